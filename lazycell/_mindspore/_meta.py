"""Running cells without storage, and leaving no trace of it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, cast

import mindspore
from mindspore import Tensor, nn
from mindspore.common import initializer as _initializers

from lazycell._errors import LazyCellError
from lazycell._mindspore._construction import replace_attribute
from lazycell._mindspore._storage import tensor_without_storage

DTYPE = type(mindspore.float32).__mro__[2]  # the common base of all dtypes
# The meta device is there from MindSpore 2.9 on. But 2.9.0 corrupts memory on it (a process that has run LSTM or
# BatchNorm there may crash much later), and nothing but the version tells.
HAS_META = hasattr(mindspore, "DeviceCtx") and not mindspore.__version__.startswith("2.9.")
_HOOKS = ("_lazy_forward_pre_hook", "_lazy_forward_hook", "_lazy_backward_pre_hook", "_lazy_backward_hook")


class _OnMeta(threading.local):
    active = False


_on_meta = _OnMeta()
_META = "meta"
_devices: list[str] = []  # those that contexts were entered from


@contextmanager
def on_meta() -> Iterator[None]:
    """A context in which operators compute shapes only."""
    _devices.append(mindspore.get_context("device_target"))
    try:
        with mindspore.DeviceCtx(_META):
            yield
    finally:
        _devices.pop()


@contextmanager
def off_meta() -> Iterator[None]:
    """Inside a context of `on_meta`, one in which tensors have storage as usual; elsewhere nothing."""
    device = next((name for name in reversed(_devices) if name != _META), None)
    if device is None:
        yield
        return
    active, _on_meta.active = _on_meta.active, False
    try:
        with mindspore.DeviceCtx(device):
            yield
    finally:
        _on_meta.active = active


@contextmanager
def items_guarded() -> Iterator[None]:
    """Refuse to assign items, and to take items of tensors with values: both crash the process on the meta device."""
    set_item, get_item = Tensor.__setitem__, Tensor.__getitem__

    def __setitem__(self: Tensor, index: Any, value: Any) -> Any:
        if _on_meta.active:
            raise LazyCellError("items are assigned where only shapes are computed.")
        return set_item(self, index, value)

    def __getitem__(self: Tensor, index: Any) -> Any:
        if _on_meta.active and not self.is_meta:
            raise LazyCellError("a tensor with values is indexed where only shapes are computed.")
        return get_item(self, index)

    undo = [replace_attribute(Tensor, name, value) for name, value in (
        ("__setitem__", __setitem__), ("__getitem__", __getitem__),
    )]  # fmt: skip
    _on_meta.active = True
    try:
        yield
    finally:
        _on_meta.active = False
        while undo:
            undo.pop()()


@contextmanager
def moved_to_meta(tensors: list[Tensor]) -> Iterator[None]:
    """Let tensors be on the meta device inside, in place, and afterwards what they were, storage and views alike."""
    kept = []
    try:
        for tensor in tensors:
            keeper = tensor_without_storage((1,), tensor.dtype, _initializers.Zero())
            Tensor.assign_value(keeper, tensor)  # shares the storage, if there is any
            kept.append((tensor, keeper, tensor.init))
            with on_meta():
                Tensor.assign_value(tensor, mindspore.ops.zeros(tensor.shape, tensor.dtype))
            tensor.init = None
        yield
    finally:
        for tensor, keeper, init in kept:
            Tensor.assign_value(tensor, keeper)
            tensor.init = init


def no_gradients() -> AbstractContextManager[Any]:
    """A context in which no gradients are recorded."""
    return cast(AbstractContextManager[Any], mindspore._no_grad())


def has_values(tensor: Tensor) -> bool:
    """Whether a tensor holds values, rather than a shape, an initializer or a place on the meta device."""
    return not (tensor.has_init or getattr(tensor, "is_meta", False))


@contextmanager
def hooks_silenced(cells: list[nn.Cell]) -> Iterator[None]:
    """Forward and backward hooks of some cells don't run inside."""
    kept = [(cell, name, cell.__dict__[name]) for cell in cells for name in _HOOKS if cell.__dict__.get(name)]
    for cell, name, _ in kept:
        cell.__dict__[name] = None
    try:
        yield
    finally:
        for cell, name, hooks in kept:
            cell.__dict__[name] = hooks


def buffers(cell: nn.Cell) -> list[tuple[str, Tensor]]:
    """A cell's own buffers, by name."""
    return [(name, value) for name, value in cell._buffers.items() if value is not None]


def set_buffer(cell: nn.Cell, name: str, value: Tensor) -> None:
    """Put a buffer's value back, in place where the tensor is the same."""
    cell._buffers[name].assign_value(value)
