"""Recording gradients: what is recorded, and at which parameters a gradient arrives."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mindspore
from mindspore import Parameter, Tensor

from lazycell._mindspore._construction import replace_attribute
from lazycell._mindspore._running import callers_of, is_recording
from lazycell._mindspore._versions import api


def gradient_running() -> bool:
    """Whether this thread is inside a function that is being differentiated."""
    return any(map(is_recording, callers_of(sys._getframe(1))))


@contextmanager
def recording_ended() -> Iterator[None]:
    """Stop recording gradients if an exception comes out of a gradient function; MindSpore goes on with it."""
    try:
        yield
    except BaseException:
        if not gradient_running():
            api._pynative_executor.clear_res()
            api._pynative_executor.set_grad_flag(False)
        raise


def can_be_captured(tensor: Tensor) -> bool:
    """Whether it makes no difference to gradients if a function takes a tensor from outside, not as an argument.

    It does to parameters, to what another gradient function computed, and to what has hooks.
    """
    return not (isinstance(tensor, Parameter) or tensor.hooks()) and bool(tensor._is_leaf)


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
    undo: Callable[[], None]


@contextmanager
def not_differentiated(tensors: list[Tensor]) -> Iterator[None]:
    """Let tensors not be what gradients are computed for, inside.

    A gradient function flags every tensor it is given, for good; the flag makes MindSpore record all that is computed
    from the tensor, and keep the activations. Hooks on what isn't recorded are accepted, and not called, as before.
    """
    flagged = [tensor for tensor in tensors if tensor._requires_grad]
    with _Hooks.lock:
        _Hooks.users += 1
        if _Hooks.users == 1:
            _Hooks.undo = replace_attribute(Tensor, "register_hook", _register_hook_anywhere)
    _unrecorded.active = True
    try:
        for tensor in flagged:
            tensor._requires_grad = False
        yield
    finally:
        for tensor in flagged:
            tensor._requires_grad = True
        _unrecorded.active = False
        with _Hooks.lock:
            _Hooks.users -= 1
            if not _Hooks.users:
                _Hooks.undo()


class Reached:
    """Which parameters a gradient arrives at, while MindSpore computes the gradients of a list of them.

    MindSpore calls a parameter's hooks when its gradient has arrived, and at the end, in the order of the list, those
    of the parameters that none has arrived at, with zeros. A parameter that nobody uses, first in the list, marks the
    border.
    """

    def __init__(self) -> None:
        self.border = Parameter(Tensor(0.0, mindspore.float32), name="lazycell_border")
        self._handles: list[Any] = []
        self._called: list[int] = []

    def watch(self, parameters: list[Parameter]) -> None:
        """Begin; the gradients of these, after that of `border`, are about to be computed."""
        self._parameters = parameters
        for parameter in (self.border, *parameters):
            self._handles.append(parameter.register_hook(self._noting(id(parameter))))

    def _noting(self, key: int) -> Callable[[Tensor], Tensor]:
        def note(gradient: Tensor) -> Tensor:  # MindSpore takes nothing but a function
            self._called.append(key)
            return gradient

        return note

    def end(self) -> list[bool]:
        """Whether a gradient has arrived at each parameter."""
        while self._handles:
            self._handles.pop().remove()
        border = id(self.border)
        if border not in self._called:
            return [True] * len(self._parameters)
        arrived = set(self._called[: self._called.index(border)])
        return [id(parameter) in arrived for parameter in self._parameters]
