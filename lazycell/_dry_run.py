"""Touch without training: shapes in, shapes out."""

from __future__ import annotations

import copy
import functools
import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import mindspore
from mindspore import Parameter, Tensor, nn

from lazycell import _deferral
from lazycell import _mindspore as internals
from lazycell import _touching
from lazycell._errors import LazyCellError
from lazycell._listed import NoticingList
from lazycell._registry import require_tracked
from lazycell._sizing import when_sized
from lazycell._unsized import is_unsized

_log = logging.getLogger("lazycell")
_lock = threading.RLock()  # modes, streams and devices are the process's, not the thread's


@dataclass(frozen=True)
class TensorSpec:
    """The shape and dtype of a tensor that doesn't exist; made by `spec`, returned by `dry_run`."""

    shape: tuple[int, ...]
    dtype: Any

    def __repr__(self) -> str:
        return f"spec({', '.join(map(str, self.shape))}, dtype={self.dtype})"


def spec(*shape: int | None, dtype: Any = mindspore.float32) -> TensorSpec:
    """An input without storage, for `dry_run`.

    Args:
        shape: The dimensions; None for one that varies, which is taken as 1.
        dtype: A dtype of MindSpore.

    Raises:
        TypeError: A dimension is no integer, or ``dtype`` is no dtype of MindSpore.
        ValueError: A dimension is negative.

    Example:
        >>> import lazycell
        >>> lazycell.spec(None, 3, 224, 224)
        spec(1, 3, 224, 224, dtype=Float32)
    """
    for size in shape:
        if size is not None and (not isinstance(size, int) or isinstance(size, bool)):
            raise TypeError(f"spec() takes integers or None, one for each dimension, but got {size!r}.")
        if size is not None and size < 0:
            raise ValueError(f"spec() takes sizes of dimensions, but got {size}; a size that varies is None.")
    if not isinstance(dtype, internals.DTYPE):
        raise TypeError(f"spec() takes a dtype of MindSpore, as mindspore.float32, but got {dtype!r}.")
    return TensorSpec(tuple(1 if size is None else size for size in shape), dtype)


def dry_run(cell: nn.Cell, *inputs: Any, **kwargs: Any) -> Any:
    """Run a cell for its touches alone: what it uses is known and allocated afterwards, as after a first call.

    On MindSpore 2.10 and later shapes alone go through the cell, with no activation memory and no arithmetic. Where
    an operator has no such version, and on older MindSpore, the cell runs on zeros, without gradients. Either way in
    PyNative mode, with hooks silent, and with modes, random streams, moving statistics and buffers as before.

    Args:
        cell: A `LazyCell`, or any cell that holds tracked ones.
        inputs: Tensors, `spec`, tensors with a shape and no values, or containers of these; anything else goes in
            as it is. Without any, those of the cell's ``set_inputs()``.
        kwargs: Inputs by name.

    Returns:
        The cell's outputs, each tensor replaced by its `spec`.

    Raises:
        TypeError: ``cell`` is no cell.
        LazyCellError: Nothing in it is tracked.
        Exception: Whatever the forward pass raises.

    Example:
        >>> import lazycell
        >>> from mindspore import nn
        >>> net = lazycell.track(nn.SequentialCell(nn.Conv2d(3, 8, 3), nn.ReLU()))
        >>> lazycell.dry_run(net, lazycell.spec(256, 3, 512, 512))
        spec(256, 8, 512, 512, dtype=Float32)
        >>> optimizer = nn.Adam(lazycell.trainable_params(net))
    """
    require_tracked(cell)
    if not inputs and not kwargs:
        inputs = tuple(cell.get_inputs() or ())

    return touch_by(cell, inputs, kwargs)


def touch_by(
    function: Callable[..., Any], inputs: tuple[Any, ...], kwargs: dict[str, Any], takes_gradients: bool = False
) -> Any:
    """Run a cell, or a function that calls some, for its touches alone; see `dry_run`.

    Args:
        function: A cell or a function.
        inputs, kwargs: What it is called with.
        takes_gradients: Whether it may take gradients itself, which are recorded then.
    """
    reachable = within([function])
    with _lock, _undisturbed(reachable.cells):
        if internals.HAS_META and not internals.gradient_running():  # whose recording would end with a failure
            try:
                with _attributes_kept(reachable):
                    return _run_on_shapes(function, reachable, inputs, kwargs)
            except Exception as error:
                name = getattr(function, "__name__", type(function).__name__)
                _log.debug("dry_run: shapes alone don't go through %s (%r); it runs on zeros", name, error)
        with _attributes_kept(reachable):
            with nullcontext() if takes_gradients else internals.no_gradients():
                return _run_on_zeros(function, reachable.cells, inputs, kwargs)


def _run_on_shapes(
    function: Callable[..., Any], reachable: Reachable, inputs: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    # Views of a tensor that isn't on the meta device crash the process there, so all that can be reached must go.
    if reachable.opaque:
        raise LazyCellError(f"{reachable.opaque[0]!r} remembers results, which would not be those of a real call.")
    with ExitStack() as stack:
        stack.enter_context(_touching.storage_postponed())
        stack.enter_context(internals.moved_to_meta([t for t in reachable.tensors if not is_unsized(t)]))
        stack.enter_context(internals.on_meta())
        stack.enter_context(internals.items_guarded())
        sized = stack.enter_context(ExitStack())
        stack.enter_context(when_sized(lambda _, tensors: sized.enter_context(internals.moved_to_meta(tensors))))
        args, named = _replace_tensors((inputs, kwargs), lambda value: _zeros(_spec_of(value)))
        return _replace_tensors(function(*args, **named), _spec_of)


def _run_on_zeros(
    function: Callable[..., Any], cells: list[nn.Cell], inputs: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    with _values_kept(cells):
        args, named = _replace_tensors((inputs, kwargs), _with_values)
        return _replace_tensors(function(*args, **named), _spec_of)


def _replace_tensors(value: Any, replace: Callable[[Any], Any]) -> Any:
    """A structure with its tensors and specs replaced; tuples, named ones too, lists and dicts stay what they are."""
    if isinstance(value, (Tensor, TensorSpec)):
        return replace(value)
    if isinstance(value, dict):
        return type(value)((key, _replace_tensors(item, replace)) for key, item in value.items())
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_replace_tensors(item, replace) for item in value))
    if isinstance(value, (tuple, list)):
        return type(value)(_replace_tensors(item, replace) for item in value)
    return value


def _spec_of(value: Tensor | TensorSpec) -> TensorSpec:
    if isinstance(value, TensorSpec):
        return value
    return TensorSpec(tuple(1 if size == -1 else size for size in value.shape), value.dtype)


def _zeros(described: TensorSpec) -> Tensor:
    return mindspore.ops.zeros(described.shape, described.dtype)


def _with_values(value: Tensor | TensorSpec) -> Tensor:
    """A tensor as it is if it has values, else zeros of its shape."""
    if isinstance(value, Tensor) and -1 not in value.shape and internals.has_values(value):
        return value
    return _zeros(_spec_of(value))


@contextmanager
def _undisturbed(cells: list[nn.Cell]) -> Iterator[None]:
    """PyNative mode, silent hooks, and random streams that stand afterwards where they stood."""
    with ExitStack() as stack:
        stack.callback(mindspore.set_context, mode=mindspore.get_context("mode"))
        mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
        stack.callback(internals.set_random_state, internals.random_state())
        stack.enter_context(internals.hooks_silenced(cells))
        stack.enter_context(_unrecorded(cells))
        with internals.recording_ended():
            yield


@contextmanager
def _unrecorded(cells: list[nn.Cell]) -> Iterator[None]:
    """Record nothing of cells after ``set_grad()``: MindSpore before 2.9 would take this pass for that of gradients."""
    recording = [cell for cell in cells if cell.requires_grad]
    for cell in recording:
        cell.requires_grad = False
    try:
        yield
    finally:
        for cell in recording:
            cell.requires_grad = True


@contextmanager
def _values_kept(cells: list[nn.Cell]) -> Iterator[None]:
    """Put back what a forward pass moves: moving statistics, counters, buffers."""
    moving = {id(p): p for current in cells for p in _touching.own_parameters(current) if not p.requires_grad}
    before = [(parameter, copy.deepcopy(parameter)) for parameter in moving.values() if not is_unsized(parameter)]
    buffers = [(current, name, value.copy()) for current in cells for name, value in internals.buffers(current)]

    def sized(_: list[nn.Cell], parameters: list[Parameter]) -> None:
        before.extend((parameter, copy.deepcopy(parameter)) for parameter in parameters if not parameter.requires_grad)

    try:
        with when_sized(sized):
            yield
    finally:
        for parameter, value in before:
            if not _deferral.is_deferred(parameter):
                parameter.set_data(value)
        for current, name, value in buffers:
            internals.set_buffer(current, name, value)


@contextmanager
def _attributes_kept(reachable: Reachable) -> Iterator[None]:
    """Put back what a forward pass leaves in attributes and containers: caches, running state, counters."""
    before = [(container, copy.copy(container)) for container in reachable.containers]
    kept_of = {id(container): kept for container, kept in before}

    def sized(cells: list[nn.Cell], _: list[Parameter]) -> None:
        for cell in cells:  # what a layer has become is nothing to be undone
            kept = kept_of.get(id(vars(cell)), {})
            kept.clear()
            kept.update(vars(cell))

    try:
        with when_sized(sized):
            yield
    finally:
        for container, kept in before:
            if isinstance(container, list):
                container[:] = kept
            elif isinstance(container, set):
                container.clear()
                container.update(kept)
            else:
                _put_back(container, kept)


def _put_back(container: dict[Any, Any], kept: dict[Any, Any]) -> None:
    """Undo changes of a dict's entries, except of those that MindSpore and lazycell keep for themselves."""
    for key in [*container]:
        private = isinstance(key, str) and key.startswith("_")
        if container[key] is not kept.get(key) and (not private or isinstance(container[key], Tensor)):
            if key in kept:
                container[key] = kept[key]
            else:
                del container[key]
    container.update({key: value for key, value in kept.items() if key not in container})


# ---------------------------------------------------------------------------------------------
# What a forward pass can reach

_CALLED = (nn.Cell, FunctionType, MethodType, functools.partial)  # what a library may have been given to call
_LIBRARIES = ("mindspore", "numpy", "lazycell", "builtins", "inspect")  # the last: signatures of classes


@dataclass(frozen=True)
class Reachable:
    """What cells and functions hold, at any depth, in attributes, closures, globals, classes and modules.

    Attributes:
        tensors: Tensors.
        cells: Cells.
        containers: The lists, sets and dicts (those of attributes too) that a forward pass may change.
        opaque: The functions that remember results where they can't be seen.
    """

    tensors: list[Tensor]
    cells: list[nn.Cell]
    containers: list[Any]
    opaque: list[Any]


def within(roots: list[Any]) -> Reachable:
    """What can be reached from cells and functions."""
    found = Reachable([], [], [], [])
    seen: dict[int, Any] = {}  # holds what it has seen, so that no id comes to mean another object
    waiting = list(roots)
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        if isinstance(value, Tensor):
            found.tensors.append(value)
            continue
        if isinstance(value, nn.Cell):
            found.cells.append(value)
        if type(value) in (list, set, dict):
            found.containers.append(value)
        elif hasattr(type(value), "cache_info"):
            found.opaque.append(value)
        waiting.extend(_referred_to(value))
    return found


def _referred_to(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return list(dict.values(value))  # looking at a cell's parameters is no use of them
    if isinstance(value, NoticingList):
        return value.raw()
    if isinstance(value, (list, tuple, set, frozenset)):
        return list(value)
    if isinstance(value, MethodType):
        return (value.__self__, value.__func__)
    if isinstance(value, FunctionType):
        return _named_by(value)
    if isinstance(value, functools.partial):
        return (value.func, value.args, value.keywords)
    if isinstance(value, property):
        return (value.fget, value.fset)
    if isinstance(value, (staticmethod, classmethod)):
        return (value.__func__,)
    if isinstance(value, type):
        return () if _is_library(value) else tuple(vars(value).values())
    if isinstance(value, ModuleType) or (_is_library(type(value)) and not isinstance(value, nn.Cell)):
        return ()
    kinds = [kind for kind in type(value).__mro__ if not _is_library(kind)]
    slots = [name for kind in kinds for name in _slots(kind)]
    return (getattr(value, "__dict__", None), *kinds, *(getattr(value, name, None) for name in slots))


def _slots(kind: type) -> tuple[str, ...]:
    slots = vars(kind).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _named_by(function: FunctionType) -> list[Any]:
    """What a function refers to: its closure, its defaults, and the globals that its code names."""
    enclosed = [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
    if function.__module__ is not None and function.__module__.partition(".")[0] in _LIBRARIES:
        return [value for value in enclosed if isinstance(value, _CALLED)]  # as gradient functions do
    found: list[Any] = [function.__defaults__, function.__kwdefaults__, getattr(function, "__wrapped__", None)]
    found += enclosed
    codes = [function.__code__]
    for code in codes:
        codes.extend(constant for constant in code.co_consts if isinstance(constant, CodeType))
        named = [function.__globals__[name] for name in code.co_names if name in function.__globals__]
        modules = [module for module in named if isinstance(module, ModuleType) and not _is_library(module)]
        for module in modules:  # and modules within modules, as in package.module.CONSTANT
            inside = [vars(module)[name] for name in code.co_names if name in vars(module)]
            modules.extend(m for m in inside if isinstance(m, ModuleType) and not _is_library(m) and m not in modules)
            named += inside
        found += named
    return found


def _is_library(thing: type | ModuleType) -> bool:
    name = thing.__name__ if isinstance(thing, ModuleType) else thing.__module__
    return name.partition(".")[0] in _LIBRARIES


def _is_filled(cell: CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # a variable that isn't assigned yet
        return False
