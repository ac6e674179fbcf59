"""The opt-in global patch: every cell lazy and tracked, whatever its class; and its undoing."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from mindspore import Parameter, nn

from lazycell import _construction, _deferral
from lazycell import _mindspore as internals
from lazycell import _touching, _tracking
from lazycell._errors import LazyCellWarning, warn
from lazycell._gradient import NATIVE_GRAD, NATIVE_VALUE_AND_GRAD, as_mindspore_takes_them
from lazycell._listed import Patched, left_out_at, list_for_good
from lazycell._live import TouchedParameters
from lazycell._optimizer import LazyOptimizer, is_native_being_built
from lazycell._standing_in import stand_in

_lock = threading.RLock()

_TAKES_ALL = """\
{name} takes its parameters in a way of its own, so it can't wait for what is used: all that it is given is allocated \
now, and counts as used. Let its __init__ take them first, as params."""

_LEFT_OUT = """\
{name} is used for the first time, after trainable_params() had been listed without it at {where}. What was made of \
that list, as groups of an optimizer, copies, or a loop that freezes, lacks it, and all that is used later: list \
parameters before the first forward pass, or after one that uses all that will be trained."""


class PatchHandle:
    """One use of `patch`; the patch stays until the last of them is removed, in whatever order.

    A context manager: leaving it is `remove`.
    """

    __module__ = "lazycell"

    def remove(self) -> None:
        """End this use; may be called twice."""
        with _lock:
            if self in _handles:
                _handles.remove(self)
                if not _handles:
                    _uninstall()

    def __enter__(self) -> PatchHandle:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


_handles: list[PatchHandle] = []
_undo: list[Callable[[], bool]] = []
_prepared: weakref.WeakSet[type] = weakref.WeakSet()
_old_cells: list[weakref.ref[nn.Cell]] = []


def patch() -> PatchHandle:
    """Let every ``nn.Cell`` be lazy and tracked from now on, whatever its class; for scripts that stay as they are.

    Cells defer their parameters, `unused layers are warned of <UnusedLayerWarning>`, ``trainable_params()`` is a live
    list, ``mindspore.grad`` and ``mindspore.value_and_grad`` are `grad` and `value_and_grad`, and optimizers wait for
    the first step, as a `LazyOptimizer` does. Cells that were built before are tracked when they are first called.

    Before anything of a net has been used, its live list shows all its parameters: what a script filters, adds, groups
    or freezes by name is deferred, and an optimizer built from it holds what comes to be touched.

    Returns:
        A handle, whose ``remove()`` undoes this use; also a context manager.

    Example:
        >>> import lazycell, mindspore as ms
        >>> from mindspore import nn
        >>> class Net(nn.Cell):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.body = nn.Dense(3, 2)
        ...         self.dead = lazycell.optional(nn.Dense(3, 2))
        ...     def construct(self, x):
        ...         return self.body(x)
        >>> with lazycell.patch():
        ...     net = Net()
        ...     optimizer = nn.Adam(net.trainable_params())
        ...     loss_and_grad = ms.value_and_grad(lambda x: net(x).sum(), None, optimizer.parameters)
        ...     loss, grads = loss_and_grad(ms.ops.ones((4, 3)))
        ...     updated = optimizer(grads)
        >>> [p.name for p in optimizer.parameters]
        ['body.weight', 'body.bias']
    """
    internals.require_known_internals()
    handle = PatchHandle()
    with _lock:
        if not _handles:
            _install()
        _handles.append(handle)
    return handle


def unpatch() -> None:
    """Leave MindSpore as it was found, whoever called `patch`, and how often.

    Nets and optimizers that were built meanwhile stay what they are, and so do functions that were imported from
    MindSpore meanwhile, which do what MindSpore's do from now on.
    """
    with _lock:
        if _handles:
            _handles.clear()
            _uninstall()


def is_patched() -> bool:
    """Whether `patch` is in force."""
    return Patched.active


def _install() -> None:
    try:
        for native in (NATIVE_GRAD, NATIVE_VALUE_AND_GRAD):
            _replace_everywhere(native, _gradient_function(native))
        _replace(nn.Cell, "__new__", staticmethod(_new(nn.Cell.__new__)))
        _replace(nn.Cell, "trainable_params", _trainable_params(nn.Cell.trainable_params))
        _replace(nn.Cell, "compile_phase", internals.compile_phase)
        for base in internals.OPTIMIZERS:
            _replace(base, "__init__", _optimizer_init(base.__init__))
        _replace_everywhere(internals.LOAD, _load_param_into_net(internals.LOAD))
        Patched.active = True
        _touching.observers.add(_left_out)
        for cell in internals.live_cells():
            if internals.is_optimizer_class(type(cell)) and not isinstance(cell, LazyOptimizer):
                list_for_good(list(vars(cell).get("parameters", ())))  # it takes gradients of all of them
            if _touching.state_of(cell) is None and internals.is_layer(cell):
                if _tracking.watch_if_possible(cell) is None:
                    _old_cells.append(weakref.ref(cell))
    except BaseException:
        _uninstall()
        raise


def _replace_everywhere(native: Any, function: Any) -> None:
    for module in internals.holders_of(native):
        _replace(module, native.__name__, function)


def _replace(owner: Any, name: str, value: Any) -> None:
    _undo.append(internals.replace_attribute(owner, name, value))


def _uninstall() -> None:
    """Put back what stood there, last things first; what others have replaced since is theirs."""
    Patched.active = False
    _touching.observers.discard(_left_out)
    was_ours = True
    while _undo:
        was_ours = _undo.pop()() and was_ours
    while _prepared:
        _construction.leave(_prepared.pop())
    while _old_cells:
        cell = _old_cells.pop()()
        if cell is not None and _touching.state_of(cell) is None:
            _tracking.unwatch(cell)
    if not was_ours:  # last, since a filter may turn it into an exception
        warn(LazyCellWarning("something else has replaced what lazycell.patch() had; it was left as it is."))


class _LeftOut(_touching.Observer):
    """Warns if parameters come to be used after a script has listed the others; once for each place in the script."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def parameter_touched(self, parameter: Parameter) -> None:
        where = left_out_at(parameter)
        if where is not None and where not in self._told:
            self._told.add(where)
            warn(LazyCellWarning(_LEFT_OUT.format(name=parameter.name, where=where)))


_left_out = _LeftOut()


# ---------------------------------------------------------------------------------------------
# What stands in. Each does what MindSpore's does once the patch is gone: somebody may have kept it.


def _new(native: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(native)
    def __new__(class_: type, *args: Any, **kwargs: Any) -> Any:
        if is_patched():
            if internals.is_optimizer_class(class_):
                class_ = stand_in(class_)
            elif internals.is_layer_class(class_):
                with _lock:
                    if is_patched() and _construction.prepare(class_, is_patched):
                        _prepared.add(class_)
        return native(class_, *args, **kwargs)

    return __new__


def _trainable_params(native: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(native)
    def trainable_params(self: nn.Cell, recurse: bool = True) -> Any:
        if not is_patched() or not internals.is_layer(self):
            return native(self, recurse)
        _tracking.adopt(self)
        return TouchedParameters(self, recurse)

    return trainable_params


def _load_param_into_net(native: Callable[..., Any]) -> Callable[..., Any]:
    """An optimizer must have state for what is loaded into it."""

    @functools.wraps(native)
    def load_param_into_net(net: Any, parameter_dict: Any, *args: Any, **kwargs: Any) -> Any:
        if is_patched() and isinstance(net, nn.Cell) and isinstance(parameter_dict, dict):
            for _, cell in net.cells_and_names():
                if isinstance(cell, LazyOptimizer):
                    cell.bear("state", parameter_dict)
        return native(net, parameter_dict, *args, **kwargs)

    return load_param_into_net


def _optimizer_init(native: Callable[..., None]) -> Callable[..., None]:
    """For optimizers that don't wait: what they are given must have storage, and counts."""

    @functools.wraps(native)
    def __init__(self: nn.Cell, *args: Any, **kwargs: Any) -> None:
        if is_patched() and not is_native_being_built():
            given = list(_parameters_in([*args, *kwargs.values()]))
            if any(map(_deferral.is_deferred, given)):
                warn(LazyCellWarning(_TAKES_ALL.format(name=type(self).__name__)))
            for parameter in given:
                _touching.touch(parameter)
        native(self, *args, **kwargs)

    return __init__


def _parameters_in(value: Any) -> Iterator[Parameter]:
    if isinstance(value, Parameter):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _parameters_in(item)


def _gradient_function(native: Callable[..., Any]) -> Callable[..., Any]:
    as_lazycells = as_mindspore_takes_them(native)

    @functools.wraps(native)  # MindSpore's compiler finds the native one by this
    def gradient_function(*args: Any, **kwargs: Any) -> Any:
        return (as_lazycells if is_patched() else native)(*args, **kwargs)

    return gradient_function
