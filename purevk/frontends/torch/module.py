"""Modules of torch as sources of graphs, which export them again where a call asks for it."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from purevk.dtypes import DType
from purevk.errors import InputError, PurevkError, UnsupportedProgramError
from purevk.frontends.advice import decides_by_elements, explain, fixes_sizes, is_of_shapes
from purevk.frontends.declared import Declared
from purevk.frontends.private_names import warn_once
from purevk.frontends.torch.caches import exportable
from purevk.frontends.torch.decompose import decompose, keep_checks, keep_earlier
from purevk.frontends.torch.elements.known_numbers import with_known_numbers
from purevk.frontends.torch.exported import WrittenBuffers, address_of, read_exported
from purevk.frontends.torch.signatures import signature_of, with_layouts
from purevk.frontends.torch.watch.effects import (
    Effects,
    applied,
    python_changes,
    refuse_effects,
    refuse_other,
    watched,
    without_noise,
)
from purevk.ir import Graph, Signature

_log = logging.getLogger("purevk")


class Tracing:
    """A lock. torch.export patches classes while it traces, so that two threads cannot trace at the
    same time. It also replaces the tensors of the module, which no other thread may read then.

    It is the lock that torch.compile holds while it traces: the modes of tracing before dispatch are
    one stack for all threads, which torch.compile empties meanwhile.
    """

    def __init__(self) -> None:
        self._exported: frozenset[int] = frozenset()  # ids of modules that are exported now

    @functools.cached_property
    def _lock(self) -> Any:
        from torch._dynamo.convert_frame import compile_lock

        keep_checks()
        return compile_lock

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    @contextlib.contextmanager
    def of(self, module: Any) -> Iterator[None]:
        """Holds the lock for the export of a module."""
        with self._lock:
            before = self._exported
            self._exported = before | set(map(id, module.modules()))
            try:
                yield
            finally:
                self._exported = before

    @contextlib.contextmanager
    def reading(self, modules: Iterable[Any]) -> Iterator[None]:
        """Keeps these modules from being exported. It waits for an export that has begun of one of
        them, not for that of others."""
        acquired = self._lock.acquire(blocking=False)
        if not acquired and not self._exported.isdisjoint(map(id, modules)):
            acquired = self._lock.acquire()
        try:
            yield
        finally:
            if acquired:
                self._lock.release()


tracing = Tracing()


class ProgramSource:
    """Graphs of a `torch.export.ExportedProgram`.

    Attributes:
        program: decomposed.
        mutable: the buffers that a method of the whole program writes. One object for all.
        known: names of the tensors whose elements decide numbers in the program.
        decisive: those of them by which `forward` decides: with others, the program is another one.
        moving: names of those that have changed, and decide no more numbers.
        trusted: the program is one of this process, see `Graph`.
    """

    decisive: frozenset[str] = frozenset()

    def __init__(
        self, name: str, program: Any, mutable: WrittenBuffers, trusted: bool = True
    ) -> None:
        self.name, self.mutable, self.given, self.trusted = name, mutable, program, trusted
        self.moving: set[str] = set()
        _warn_of_one_tensor_twice(name, program)
        self.renew()
        self.signature: Signature | None = with_layouts(
            signature_of(program), program, self.program
        )
        self.mutable.add(self.name, self.program)

    def renew(self) -> None:
        """Reads the program again: tensors of it are in `moving` now."""
        with tracing:
            self.program, self.known = with_known_numbers(
                decompose(self.given), self.given, self.moving, self.mutable.keys
            )

    def __call__(self, sizes: Any) -> Graph:
        _follow_writes(self)
        return read_exported(
            *(self.program, sizes, self.name, self.mutable.keys),
            signature=self.signature,
            trusted=self.trusted,
        )

    def tensors(self) -> dict[str, Any]:
        """The parameters, buffers and constants by name."""
        return tensors_of(self.program)


class ModuleSource:
    """Graphs of a module, from one export.

    Args:
        name: of the method. module: in eval mode or not, as it is.
        args, kwargs: example inputs.
        dynamic_shapes: as for `torch.export.export`.
        mutable, moving: see `ProgramSource`.

    Raises what `torch.export.export` raises, with a note that says what to do next.
    """

    def __init__(
        self,
        name: str,
        module: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        dynamic_shapes: Any,
        mutable: WrittenBuffers,
        declared: Declared | None = None,
        moving: set[str] | None = None,
    ) -> None:
        import torch
        from torch.utils._pytree import tree_map

        from purevk.frontends.torch.fast_paths import masks_as_given, with_bounds_of_floats
        from purevk.frontends.torch.recurrent import traced_whole

        args, kwargs = tree_map(_from_numpy, (tuple(args), dict(kwargs)))
        self.name, self.module, self.mutable = name, module, mutable
        self.moving = set() if moving is None else moving
        self.declared = declared or Declared(module, args, kwargs, dynamic_shapes)
        positional, named = _distinct((tuple(args), dict(kwargs)))
        self._shapes = dynamic_shapes
        try:
            with (
                tracing.of(module),
                without_noise(),
                torch.no_grad(),
                exportable(module),
                masks_as_given(),
                traced_whole(),
                with_bounds_of_floats(),
            ):
                try:
                    program = _export(module, positional, named, dynamic_shapes)
                except Exception as error:
                    without_ones = self.declared.without_ones(positional, named)
                    if declared is not None or without_ones is None or not fixes_sizes(error):
                        raise
                    positional, named = without_ones
                    program = _export_instead(error, module, positional, named, dynamic_shapes)
                exported, effects, self.decisive = program
                keep_earlier(exported)
                self.program, known_numbers = with_known_numbers(
                    decompose(exported), None, self.moving, mutable.keys
                )
                self.known = known_numbers | self.decisive
                _refuse_moving(self, self.program.graph_signature.buffers_to_mutate.values())
        except Exception as error:
            if not isinstance(error, PurevkError):
                explain(error, name, module, self.declared.fixed(args, kwargs))
            raise
        self.signature = with_layouts(
            signature_of(exported, module), exported, self.program, effects
        )
        self.mutable.add(self.name, self.program)
        self._example = positional, named
        self.dim_names = self.declared.names(self._leaves(positional, named))

    def renew(self) -> None:
        """Exports the module again for the same example inputs: it has other tensors."""
        args, kwargs = self._example
        try:
            source = ModuleSource(
                self.name,
                self.module,
                args,
                kwargs,
                self._shapes,
                self.mutable,
                self.declared,
                self.moving,
            )
        except PurevkError:
            raise
        except Exception as error:  # torch.export raises errors of many classes
            raise InputError(
                f"the changed module cannot be exported: {type(error).__name__}",
                where=f"method {self.name}",
                why=str(error).strip().partition("\n")[0],
                next="undo the change, or compile the module again",
            ) from error
        self.program, self.signature = source.program, source.signature
        self.known, self.decisive = source.known, source.decisive

    def __call__(self, sizes: Any, exact: bool = True) -> Graph:
        _follow_writes(self)
        return read_exported(
            self.program,
            sizes,
            self.name,
            self.mutable.keys,
            signature=self.signature,
            dim_names=self.dim_names,
            exact=exact,
        )

    def for_file(self, sizes: Any) -> Graph:
        """The graph with the bounds that `torch.export` states: a file cannot be exported again for
        sizes of 0 and 1."""
        return self(sizes, exact=False)

    def tensors(self) -> dict[str, Any]:
        """The parameters, buffers and constants by name."""
        return tensors_of(self.program)

    def _leaves(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[tuple[str, Any]]:
        """The tensors and Python values of a call, each with the parameter that it belongs to."""
        from torch.utils._pytree import tree_leaves

        names = [
            parameter.name for parameter in (self.signature.parameters if self.signature else ())
        ]
        values = [*args, *kwargs.values()]
        return [(name, leaf) for name, value in zip(names, values) for leaf in tree_leaves(value)]

    def again(self, args: Sequence[Any], kwargs: Mapping[str, Any], bounds: str) -> ModuleSource:
        """The module exported for another call: with its Python values, nested as it is, and for its
        sizes. Dims that were declared as dynamic stay so where torch can keep them.

        Raises:
            SizeConstraintError: a size is outside of the bounds that the user declared.
            InputError: torch cannot export the module for this call.
        """
        args, kwargs = _normalized(args, kwargs)
        self.declared.refuse_outside(args, kwargs, bounds, self._example)
        shapes = self.declared.automatic(args, kwargs, self._example)
        for dynamic in (shapes, None) if shapes is not None else (None,):
            try:
                return ModuleSource(
                    self.name,
                    self.module,
                    args,
                    kwargs,
                    dynamic,
                    self.mutable,
                    self.declared,
                    self.moving,
                )
            except UnsupportedProgramError:
                raise
            except Exception as error:  # torch.export raises errors of many classes
                failed = error
                _log.debug("%s: export with %s failed: %s", self.name, dynamic, error)
        raise InputError(
            f"the module does not take such a call: {type(failed).__name__}",
            where=f"method {self.name}",
            why=str(failed).strip().partition("\n")[0],
            next="call it as the module itself can be called",
        ) from failed


def _export(
    module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic_shapes: Any
) -> tuple[Any, Effects, frozenset[str]]:
    """The exported program, what else the module did, and the buffers by whose elements it decided.

    Raises:
        UnsupportedProgramError: `forward` leaves something in Python objects that the next call, or
            the caller, reads.
    """
    import torch

    from purevk.frontends.torch.elements.traced_numbers import NumbersOfTensors
    from purevk.frontends.torch.fast_paths import without_new_hooks

    warn_once()
    numbers: Any = contextlib.nullcontext()

    def export() -> Any:
        with numbers, without_new_hooks():
            return torch.export.export(
                module, args, kwargs, dynamic_shapes=dynamic_shapes, strict=False
            )

    def watch() -> tuple[Any, Effects]:
        with watched(module) as effects, _graph_to_log():
            return export(), effects

    try:
        exported, effects = watch()
    except Exception as error:
        if not decides_by_elements(error):
            raise
        _log.debug("export without the elements of buffers and constants failed: %s", error)
        numbers = NumbersOfTensors(module)
    if isinstance(numbers, NumbersOfTensors):
        exported, effects = watch()  # what it raises is about inputs
    refuse_effects(module, effects, exported)
    changes = python_changes(effects)
    if changes:
        second = None
        with (
            contextlib.suppress(Exception),
            applied(changes),
            watched(module),
            _graph_to_log(),
        ):
            second = export()
        refuse_other(module, effects, exported, second)
    return exported, effects, frozenset(getattr(numbers, "used", ()))


def _export_instead(
    error: Exception, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], shapes: Any
) -> tuple[Any, Effects, frozenset[str]]:
    """What `_export` gives for other example inputs than those with which it raised `error`. If it
    fails for them, too, raises what it says of dynamic shapes, else `error`."""
    try:
        return _export(module, args, kwargs, shapes)
    except UnsupportedProgramError:
        raise
    except Exception as error_:  # torch.export raises errors of many classes
        if is_of_shapes(error_):
            raise error_ from None
        _log.debug("export without sizes of 1 in the example failed: %s", error_)
    raise error


@contextlib.contextmanager
def _graph_to_log() -> Iterator[None]:
    """Within, a failed export does not print the graph until the error to the terminal, which may have
    thousands of lines. It goes to the log. Only within `tracing`."""
    from torch.export import _trace

    def print_to_log(*graph: Any, **_: Any) -> None:
        _log.debug("the graph until the error: %s", *graph)

    before = vars(_trace).get("print", print)
    vars(_trace)["print"] = print_to_log
    try:
        yield
    finally:
        vars(_trace)["print"] = before


def _follow_writes(source: ProgramSource | ModuleSource) -> None:
    """Reads a source again if methods that came later write tensors that decide numbers in it."""
    tensors = source.tensors() if source.known else {}
    written = {name for name in source.known if address_of(tensors[name]) in source.mutable.keys}
    if written:
        _refuse_moving(source, written)
        source.moving |= written
        source.renew()


def _refuse_moving(source: ProgramSource | ModuleSource, written: Iterable[str]) -> None:
    """Refuses buffers that the device writes, and by whose elements `forward` decides."""
    for name in source.decisive.intersection(written):
        raise UnsupportedProgramError(
            f"forward decides by the elements of the buffer {name}, which a call writes",
            where=f"method {source.name}",
            why="the graph is made once, and torch.export cannot follow both ways",
            next="keep the number in Python, or use torch.cond or torch.where",
        )


def tensors_of(program: Any) -> dict[str, Any]:
    """The parameters, buffers and constants of an exported program by name."""
    import torch

    constants = {
        name: value for name, value in program.constants.items() if isinstance(value, torch.Tensor)
    }
    return {**program.state_dict, **constants}


def _warn_of_one_tensor_twice(name: str, program: Any) -> None:
    """torch.export takes two example inputs that are one tensor for one input, in every call."""
    import torch
    from torch.utils._pytree import tree_leaves

    leaves = [leaf for leaf in tree_leaves(program.example_inputs) if type(leaf) is torch.Tensor]
    if len(set(map(id, leaves))) < len(leaves):
        _log.warning(
            "%s: the program was exported with one tensor as two example inputs, so torch.export"
            " reads one of the two wherever either is meant; export it with tensors of their own",
            name,
        )


def _distinct(value: Any) -> Any:
    """Example inputs, each with memory of its own: torch.export takes two that are one object for
    one input, whatever a call gives, and cannot trace writes into views of one storage."""
    import torch
    from torch.utils._pytree import tree_map

    seen: set[int] = set()

    def own(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or leaf.layout is not torch.strided:
            return leaf
        memory = id(leaf) if leaf.is_meta else leaf.untyped_storage()._cdata
        if memory not in seen:
            seen.add(memory)
            return leaf
        return leaf.detach().clone().requires_grad_(leaf.requires_grad)

    return tree_map(own, value)


def _normalized(
    args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments as torch tensors and Python values."""
    from torch.utils._pytree import tree_map

    positional, named = tree_map(_as_torch, (tuple(args), dict(kwargs)))
    return positional, named


def _as_torch(leaf: Any) -> Any:
    import torch

    return leaf.detach() if isinstance(leaf, torch.Tensor) else _from_numpy(leaf)


def _from_numpy(leaf: Any) -> Any:
    """An array of numpy as a tensor, and its scalars as Python's."""
    import torch

    if isinstance(leaf, np.ndarray):
        foreign = DType.__members__.get(leaf.dtype.name)
        if foreign is not None and not foreign.has_numpy:
            return torch.from_numpy(leaf.view(foreign.numpy).copy()).view(foreign.to_torch())
        return _with_strides(leaf)
    return leaf.item() if isinstance(leaf, np.generic) else leaf


def _with_strides(array: np.ndarray) -> Any:
    """A tensor with the elements and the strides of an array."""
    import torch

    strides = [stride // array.itemsize for stride in array.strides]
    if array.flags.c_contiguous or any(stride % array.itemsize for stride in array.strides):
        return torch.from_numpy(array.copy())
    if min(strides) < 0:
        return torch.from_numpy(array.copy())  # torch has no negative strides
    empty = torch.empty_strided(
        array.shape, strides, dtype=torch.from_numpy(array.reshape(-1)[:0].copy()).dtype
    )
    if 0 not in strides:
        empty.copy_(torch.from_numpy(array.copy()))
    return empty
