"""Recording gradients: what is recorded, and at which parameters a gradient arrives."""

from __future__ import annotations

import inspect
import operator
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mindspore
from mindspore import Parameter, Tensor, nn

from lazycell._mindspore._construction import replace_attribute
from lazycell._mindspore._running import callers_of, is_recording, running_cells
from lazycell._mindspore._versions import api


def gradient_running() -> bool:
    """Whether this thread is inside something that is being differentiated: a function, or a cell after set_grad()."""
    frame = sys._getframe(1)
    return any(map(is_recording, callers_of(frame))) or any(cell.requires_grad for cell in running_cells(frame))


# MindSpore 2.9 and later can be asked; before, gradient functions decide by themselves.
_CAN_BE_ASKED = "obj" in list(inspect.signature(api._pynative_executor.check_run).parameters)[:1]


def may_have_run(cell: nn.Cell, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether MindSpore may have recorded a forward pass of a cell, after ``set_grad()``, that a gradient will take."""
    if not cell.requires_grad or not _CAN_BE_ASKED:
        return bool(cell.requires_grad)
    return bool(api._pynative_executor.check_run(cell, *args, **kwargs)[0])


@contextmanager
def recording_ended() -> Iterator[None]:
    """Stop recording gradients if an exception comes out of a gradient function; MindSpore goes on with it."""
    try:
        yield
    except BaseException:
        _end_recording()
        raise


def end_forgotten_recording() -> None:
    """Stop what an exception out of MindSpore's own gradient function has left on.

    While it is on, graphs are run by another way, which takes the first that was compiled of a function.
    """
    if api._pynative_executor.grad_flag():
        _end_recording()


def _end_recording() -> None:
    if not gradient_running():
        api._pynative_executor.clear_res()
        api._pynative_executor.set_grad_flag(False)


def captured(value: Any) -> tuple[bool, Any]:
    """What a function can take from outside, instead of as an argument, without a difference to its gradients.

    A gradient function flags every tensor it is given, for good; the flag makes MindSpore record all that is computed
    from the tensor, and keep the activations. Taken from outside, a tensor that wasn't flagged before isn't now; of one
    that was, another is taken, which shares its storage. (To take the flag away and put it back would leave gradients
    that the function itself computes zero.)

    Returns:
        Whether it can be done, and the value to take. It can't with parameters, with what another gradient function
        computed, with tensors that have hooks, and with flagged ones inside lists and dicts, which the function may
        want to change.
    """
    if isinstance(value, Tensor):
        if isinstance(value, Parameter) or not value._is_leaf or value.hooks():
            return False, value
        return True, mindspore.ops.stop_gradient(value) if value._requires_grad else value
    if type(value) is tuple or (isinstance(value, tuple) and hasattr(value, "_fields")):
        items = [captured(item) for item in value]
        taken = [item for _, item in items]
        if not all(map(operator.is_, taken, value)):
            value = type(value)._make(taken) if hasattr(value, "_make") else tuple(taken)
        return all(can for can, _ in items), value
    if isinstance(value, (list, tuple, dict)):
        held = list(value.values()) if isinstance(value, dict) else list(value)
        items = [captured(item) for item in held]
        return all(can and taken is item for (can, taken), item in zip(items, held)), value
    return True, value


_register_hook = Tensor.register_hook
_unrecorded = threading.local()


def _register_hook_anywhere(self: Tensor, hook: Callable[..., Any]) -> Any:
    if getattr(_unrecorded, "active", False) and not self._requires_grad:
        self._requires_grad = True  # MindSpore refuses otherwise; no gradient comes this way in either case
    return _register_hook(self, hook)


class _Hooks:
    """Counts who needs `Tensor.register_hook` to be lenient."""

    lock = threading.Lock()
    users = 0
    undo: Callable[[], bool]


@contextmanager
def hooks_anywhere() -> Iterator[None]:
    """Accept hooks on what isn't recorded; they aren't called, as they aren't if it is recorded."""
    with _Hooks.lock:
        _Hooks.users += 1
        if _Hooks.users == 1:
            _Hooks.undo = replace_attribute(Tensor, "register_hook", _register_hook_anywhere)
    _unrecorded.active = True
    try:
        yield
    finally:
        _unrecorded.active = False
        with _Hooks.lock:
            _Hooks.users -= 1
            if not _Hooks.users:
                _Hooks.undo()


def trainable_flags(parameters: list[Parameter]) -> list[bool]:
    """Whether each of some parameters requires a gradient; asked at each step, and the property costs three calls."""
    get = object.__getattribute__  # deferred ones have a slower one, which is for values
    return [get(parameter, "_param_info").requires_grad for parameter in parameters]


class Reached:
    """Which parameters a gradient arrives at, while MindSpore computes the gradients of a list of them.

    MindSpore calls a parameter's hooks when its gradient has arrived, and at the end, in the order of the list, those
    of the parameters that none has arrived at, with zeros. A parameter that nobody uses, first in the list, marks the
    border.
    """

    _spare = threading.local()

    def __init__(self) -> None:
        # One for each thread, as long as it comes back without an error: MindSpore would go on calling its hooks.
        border, self._spare.border = getattr(self._spare, "border", None), None
        if border is None:
            border = Parameter(Tensor(0.0, mindspore.float32), name="lazycell_border")
        self.border: Parameter = border
        self._parameters: list[Parameter] = []
        self._handles: list[Any] = []
        self._called: list[int] | None = []

    def watch(self, parameters: list[Parameter]) -> None:
        """Begin; the gradients of these, after that of `border`, are about to be computed."""
        self._parameters = parameters
        for parameter in (self.border, *parameters):
            # Not by Parameter's own method, nor by handle.remove(): each call of these makes MindSpore before 2.10
            # compile every graph anew at its next call.
            self._handles.append(_register_hook(parameter, self._noting(id(parameter))).id)

    def _noting(self, key: int) -> Callable[[Tensor], Tensor]:
        def note(gradient: Tensor) -> Tensor:  # MindSpore takes nothing but a function
            if self._called is not None:  # after an error in a backward pass MindSpore doesn't let go of its hooks
                self._called.append(key)
            return gradient

        return note

    def end(self) -> list[bool]:
        """Whether a gradient has arrived at each parameter."""
        while self._handles:
            Tensor.remove_hook(self._handles.pop())
        called, border = self._called or [], id(self.border)
        parameters, self._parameters, self._called = self._parameters, [], None
        if border not in called:
            return [True] * len(parameters)
        self._spare.border = self.border
        arrived = set(called[: called.index(border)])
        return [id(parameter) in arrived for parameter in parameters]
