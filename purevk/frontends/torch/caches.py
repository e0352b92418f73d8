"""Key/value caches of transformers, in modules that torch.export traces.

torch.export takes and returns objects that it knows as pytrees, and writes only into tensors that
are buffers. A `DynamicCache` is made a pytree. The tensors of a `StaticCache` that a module has as
an attribute are buffers of the module while it is traced, so they become states of the program.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from purevk.errors import InputError, UnsupportedProgramError

_registered: set[type] = set()


@contextlib.contextmanager
def exportable(module: Any) -> Iterator[None]:
    """Within, torch.export can trace a module that has, takes or returns caches of transformers.

    Raises:
        InputError: a static cache of the module has no memory yet.
        UnsupportedProgramError: a static cache has layers of sliding windows.
    """
    known = sys.modules.get("transformers.cache_utils")
    if known is None:
        yield
        return
    _register(known.DynamicCache, known.DynamicLayer)
    held = dict(_tensors(module, known.Cache))
    for name, (layer, part) in held.items():
        module.register_buffer(name, getattr(layer, part), persistent=False)

    def take_buffers(*_: Any) -> None:
        """torch.export traces the buffers of modules, not the tensors of other objects."""
        for name, (layer, part) in held.items():
            setattr(layer, part, getattr(module, name))

    originals = {name: getattr(layer, part) for name, (layer, part) in held.items()}
    hook = module.register_forward_pre_hook(take_buffers)
    try:
        yield
    finally:
        hook.remove()
        for name, (layer, part) in held.items():
            setattr(layer, part, originals[name])
            delattr(module, name)


def _tensors(module: Any, kind: Any) -> Iterator[tuple[str, tuple[Any, str]]]:
    """The tensors of the static caches that a module and its children have as attributes: a name,
    and the layer of the cache with the attribute."""
    import torch

    found: set[int] = set()
    for path, child in module.named_modules():
        for name, value in vars(child).items():
            if not isinstance(value, kind) or id(value) in found:
                continue
            found.add(id(value))
            label = "_".join(filter(None, (*path.split("."), name)))
            for number, layer in enumerate(value.layers):
                if not hasattr(layer, "max_cache_len"):
                    continue
                if hasattr(layer, "cumulative_length_int"):
                    raise UnsupportedProgramError(
                        f"the static cache {name!r} has a layer of {type(layer).__name__}",
                        where=type(child).__name__,
                        why="it knows how full it is by a Python number, which torch.export takes for"
                        " a constant",
                        next="put a StaticLayer of the cache's whole length in its place: masks of"
                        " sliding windows work with it. torch.compile takes both",
                    )
                if not layer.is_initialized:
                    raise InputError(
                        f"the static cache {name!r} has no memory yet",
                        where=type(child).__name__,
                        why="it takes its sizes from its first call, which torch.export only traces",
                        next="call its early_initialization(batch_size, num_heads, head_dim, dtype,"
                        " device) before",
                    )
                for part, tensor in vars(layer).items():
                    if isinstance(tensor, torch.Tensor):
                        yield f"{label}_{number}_{part}", (layer, part)


def _register(cache: Any, plain: Any) -> None:
    """Makes `DynamicCache` a pytree of the keys and values of its layers, unless it is one."""
    from torch.fx import _pytree as fx_pytree
    from torch.utils import _pytree as pytree

    if cache in _registered or cache in pytree.SUPPORTED_NODES:
        return

    def flatten(value: Any) -> tuple[list[Any], list[str]]:
        other = {type(layer).__name__ for layer in value.layers if type(layer) is not plain}
        if other:
            raise UnsupportedProgramError(
                f"a cache with layers of {', '.join(sorted(other))} cannot be traced",
                why=f"only {plain.__name__} has all that it knows in tensors",
                next="use a StaticCache, or call the model with use_cache=False",
            )
        layers = [(at, each) for at, each in enumerate(value.layers) if each.is_initialized]
        names = [f"{part}_{at}" for at, _ in layers for part in ("keys", "values")]
        return [each for _, layer in layers for each in (layer.keys, layer.values)], names

    def unflatten(tensors: Iterable[Any], names: Any) -> Any:
        import torch

        made, given = cache(), list(tensors)
        for keys, values in zip(given[::2], given[1::2], strict=True):
            layer = plain()
            layer.keys, layer.values, layer.is_initialized = keys, values, True
            if isinstance(keys, torch.Tensor):
                layer.dtype, layer.device = keys.dtype, keys.device
            made.layers.append(layer)
        return made

    pytree.register_pytree_node(
        cache,
        flatten,
        unflatten,
        serialized_type_name=f"{cache.__module__}.{cache.__name__}",
        flatten_with_keys_fn=lambda value: (
            [(pytree.MappingKey(name), each) for each, name in zip(*flatten(value))],
            flatten(value)[1],
        ),
    )
    fx_pytree.register_pytree_flatten_spec(cache, lambda value, spec: flatten(value)[0])
    _registered.add(cache)
