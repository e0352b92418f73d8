"""Key/value caches of transformers, in modules that torch.export traces.

torch.export takes and returns objects that it knows as pytrees, and writes only into tensors that
are buffers. A `DynamicCache` is made a pytree. The tensors of a `StaticCache` that a module has as
an attribute are buffers of the module while it is traced, so they become states of the program.
Layers of sliding windows, which count tokens in Python, are replaced meanwhile (`windows.py`).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from purevk.errors import InputError, UnsupportedProgramError
from purevk.frontends.torch.windows import traceable_windows

_registered: set[type] = set()


@contextlib.contextmanager
def exportable(module: Any) -> Iterator[None]:
    """Within, torch.export can trace a module that has, takes or returns caches of transformers.

    Raises:
        InputError: a static cache of the module has no memory yet.
        UnsupportedProgramError: a static cache has layers of a kind that counts tokens in Python.
    """
    cache_module = sys.modules.get("transformers.cache_utils")
    if cache_module is None:
        yield
        return
    _register(cache_module)
    with traceable_windows(_caches(module, cache_module.Cache)):
        with _as_buffers(module, dict(_tensors(module, cache_module.Cache))):
            yield


@contextlib.contextmanager
def _as_buffers(module: Any, tensors: dict[str, tuple[Any, str]]) -> Iterator[None]:
    """Within, tensors of layers of caches are buffers of a module: see `_tensors`. Those that are
    buffers already stay these: torch cannot trace two that share memory and are written."""
    buffers = {id(buffer): path for path, buffer in module.named_buffers()}
    originals = {name: getattr(layer, part) for name, (layer, part) in tensors.items()}
    paths = {name: buffers.get(id(tensor), name) for name, tensor in originals.items()}
    added = [name for name, path in paths.items() if name == path]
    for name in added:
        module.register_buffer(name, originals[name], persistent=False)

    def take_buffers(*_: Any) -> None:
        """torch.export traces the buffers of modules, not the tensors of other objects."""
        for name, (layer, part) in tensors.items():
            setattr(layer, part, module.get_buffer(paths[name]))

    hook = module.register_forward_pre_hook(take_buffers)
    try:
        yield
    finally:
        hook.remove()
        for name, (layer, part) in tensors.items():
            setattr(layer, part, originals[name])
        for name in added:
            delattr(module, name)


def _caches(module: Any, kind: Any) -> Iterator[tuple[Any, str, Any]]:
    """The caches that a module and its children have as attributes: the child, a name for them, and
    the cache."""
    ids: set[int] = set()
    for path, child in module.named_modules():
        for name, value in vars(child).items():
            if not isinstance(value, kind):
                continue
            label = "_".join(filter(None, (*path.split("."), name)))
            for suffix, part in _parts(value):
                if id(part) not in ids:
                    ids.add(id(part))
                    yield child, label + suffix, part


def _parts(cache: Any) -> list[tuple[str, Any]]:
    """The caches with layers: those of an `EncoderDecoderCache`, which has none itself, or the
    cache."""
    if hasattr(cache, "cross_attention_cache"):
        return [("_self", cache.self_attention_cache), ("_cross", cache.cross_attention_cache)]
    return [("", cache)]


def _tensors(module: Any, kind: Any) -> Iterator[tuple[str, tuple[Any, str]]]:
    """The tensors of the static caches of a module: a name, and the layer of the cache with the
    attribute."""
    import torch

    for child, label, cache in _caches(module, kind):
        for number, layer in enumerate(cache.layers):
            if not hasattr(layer, "max_cache_len"):
                continue
            if hasattr(layer, "cumulative_length_int"):
                raise UnsupportedProgramError(
                    f"the static cache {label!r} has a layer of {type(layer).__name__}",
                    where=type(child).__name__,
                    why="it knows how full it is by a Python number, which torch.export takes for"
                    " a constant",
                    next="put a StaticLayer of the cache's whole length in its place: masks of"
                    " sliding windows work with it. torch.compile takes both",
                )
            if not layer.is_initialized:
                raise InputError(
                    f"the static cache {label!r} has no memory yet",
                    where=type(child).__name__,
                    why="it takes its sizes from its first call, which torch.export only traces",
                    next="call its early_initialization(batch_size, num_heads, head_dim, dtype,"
                    " device) before",
                )
            for part, tensor in vars(layer).items():
                if isinstance(tensor, torch.Tensor):
                    yield f"{label}_{number}_{part}", (layer, part)


def _register(cache_module: Any) -> None:
    """Makes `DynamicCache` a pytree, unless it is one: the keys and values of its layers, and of
    layers of sliding windows the number of tokens that they have seen."""
    from torch.fx import _pytree as fx_pytree
    from torch.utils import _pytree as pytree

    cache, plain, window = (
        cache_module.DynamicCache,
        cache_module.DynamicLayer,
        cache_module.DynamicSlidingWindowLayer,
    )
    if cache in _registered or cache in pytree.SUPPORTED_NODES:
        return

    def flatten(value: Any) -> tuple[list[Any], list[list[Any]]]:
        unsupported = {
            type(layer).__name__ for layer in value.layers if type(layer) not in (plain, window)
        }
        if unsupported:
            raise UnsupportedProgramError(
                f"a cache with layers of {', '.join(sorted(unsupported))} cannot be traced",
                why=f"only {plain.__name__} and {window.__name__} are known",
                next="use a StaticCache, or call the model with use_cache=False",
            )
        children: list[Any] = []
        names: list[str] = []
        kinds: list[list[int]] = []  # whether a layer has content, and its window, if it has one
        for at, layer in enumerate(value.layers):
            parts = ["keys", "values"] if layer.is_initialized else []
            kinds.append([int(layer.is_initialized)])
            if type(layer) is window:
                if layer.record_past:
                    raise UnsupportedProgramError(
                        "a cache that keeps more than its window, for assisted generation, cannot"
                        " be traced",
                        next="use a StaticCache, or call the model with use_cache=False",
                    )
                kinds[-1].append(layer.sliding_window)
                parts.append("cumulative_length")
            children += [getattr(layer, part) for part in parts]
            names += [f"{part}_{at}" for part in parts]
        return children, [names, kinds]

    def unflatten(tensors: Iterable[Any], context: Any) -> Any:
        import torch

        rebuilt, leaves = cache(), iter(tensors)
        for initialized, *size in context[1]:
            layer = window(*size) if size else plain()
            if initialized:
                layer.keys, layer.values, layer.is_initialized = next(leaves), next(leaves), True
                if isinstance(layer.keys, torch.Tensor):
                    layer.dtype, layer.device = layer.keys.dtype, layer.keys.device
            if size:
                layer.cumulative_length = next(leaves)
            rebuilt.layers.append(layer)
        return rebuilt

    def with_keys(value: Any) -> tuple[list[Any], Any]:
        children, context = flatten(value)
        return [
            (pytree.MappingKey(name), child) for name, child in zip(context[0], children)
        ], context

    pytree.register_pytree_node(
        cache,
        flatten,
        unflatten,
        serialized_type_name=f"{cache.__module__}.{cache.__name__}",
        flatten_with_keys_fn=with_keys,
    )
    fx_pytree.register_pytree_flatten_spec(cache, lambda value, spec: flatten(value)[0])
    _registered.add(cache)
