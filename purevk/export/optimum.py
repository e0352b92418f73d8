"""A recipe for optimum-executorch: `purevk.export.optimum.register()` adds "purevk" to its recipes.

    import purevk.export.optimum
    from optimum.exporters.executorch import main_export

    purevk.export.optimum.register()
    main_export("model/", "text-generation", "purevk", "exported/", recipe_kwargs={"force_fp16": True})

Its command line knows recipes of its own package only.
"""

from __future__ import annotations

from typing import Any

from purevk.errors import UnsupportedProgramError
from purevk.export.partitioner import PurevkPartitioner


def register(name: str = "purevk") -> None:
    """Adds the recipe: the graphs go to the Vulkan delegate by `PurevkPartitioner`, with what has no
    kernel left to the portable ones.

    Args:
        name: of the recipe.

    Raises:
        UnsupportedProgramError: optimum-executorch is not installed.
    """
    try:
        from optimum.exporters.executorch import recipe_registry
    except ImportError as error:
        raise UnsupportedProgramError(
            "there is no optimum-executorch", why=str(error), next="pip install optimum-executorch"
        ) from error
    recipe_registry.register_recipe(name)(export)


def export(model: Any, **options: Any) -> dict[str, Any]:
    """The programs of a model by the names of their files, as recipes return them.

    Args:
        model: of one of optimum's classes, with `export` and `metadata`.
        options: compile options of `PurevkPartitioner`.
    """
    from executorch.exir import (
        EdgeCompileConfig,
        ExecutorchBackendConfig,
        to_edge_transform_and_lower,
    )
    from executorch.exir.passes import MemoryPlanningPass
    from optimum.executorch.passes.remove_padding_idx_embedding_pass import (
        RemovePaddingIdxEmbeddingPass,
    )

    methods = model.export()
    if len(methods) == 1:  # its runner calls a single method so
        methods = {"forward": next(iter(methods.values()))}
    shares = len(methods) > 1
    edge = to_edge_transform_and_lower(
        methods,
        partitioner=[PurevkPartitioner(options, share_buffers=shares)],
        compile_config=EdgeCompileConfig(_check_ir_validity=False, _skip_dim_order=True),
        constant_methods=model.metadata,
        transform_passes=[RemovePaddingIdxEmbeddingPass()],
    )
    planning = MemoryPlanningPass(share_mutable_buffers=shares)
    return {"model": edge.to_executorch(ExecutorchBackendConfig(memory_planning_pass=planning))}
