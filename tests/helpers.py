"""What several test modules need."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import mindspore as ms
import numpy as np
import psutil
from mindspore import Parameter, Tensor, nn

import lazycell
from lazycell import _deferral, _touching, _unsized


def seed(value: int = 0) -> None:
    """Put the random streams where a fresh run with this seed has them."""
    ms.set_seed(value)
    np.random.seed(value)


def stream() -> tuple[Any, ...]:
    """The state of NumPy's global random stream, to compare."""
    _, keys, position, *rest = np.random.get_state()
    return keys.tobytes(), position, tuple(rest)


def ones(*shape: int) -> Tensor:
    """A tensor of ones."""
    return Tensor(np.ones(shape, np.float32))


def bits(tensor: Tensor) -> tuple[Any, ...]:
    """A tensor's value, to compare bit for bit."""
    array = tensor.asnumpy()
    return array.dtype.str, array.shape, array.tobytes()


def names(parameters: Any) -> list[str]:
    """The names of parameters."""
    return [parameter.name for parameter in parameters]


def deferred(cell: nn.Cell) -> set[str]:
    """The names of the deferred parameters below a cell."""
    return {p.name for p in cell.get_parameters() if _deferral.is_deferred(p)}


def is_deferred(parameter: Parameter) -> bool:
    """Whether a parameter has no storage."""
    return _deferral.is_deferred(parameter)


def touched(cell: nn.Cell) -> set[str]:
    """The names of the touched parameters below a cell, trainable or not."""
    return {p.name for p in cell.get_parameters() if _touching.is_touched(p)}


def both(make: Callable[[type[nn.Cell]], nn.Cell], value: int = 0) -> tuple[nn.Cell, nn.Cell]:
    """The same net on ``nn.Cell`` and on ``LazyCell``, built from the same seed; the streams must agree after it."""
    seed(value)
    eager = make(nn.Cell)
    after = stream()
    seed(value)
    lazy = make(lazycell.LazyCell)
    assert after == stream()
    return eager, lazy


def assert_same_values(eager: nn.Cell, lazy: nn.Cell) -> None:
    """Every parameter has the same name, flags and bits in both nets; materializes all."""
    for one, other in zip(eager.get_parameters(), lazy.get_parameters(), strict=True):
        if _unsized.is_unsized(other):
            _unsized.sizing_of(other).size_by_parameter(other, one.shape)  # as if a value were about to be loaded
        assert (one.name, one.requires_grad) == (other.name, other.requires_grad)
        assert bits(one) == bits(other), one.name


def resident_bytes() -> int:
    """Bytes of memory that this process holds."""
    gc.collect()
    return int(psutil.Process().memory_info().rss)


def _calls(function: Callable[[], object], counts: Callable[[FrameType], bool]) -> int:
    count = 0

    def profile(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event == "call" and counts(frame)

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


def lazycell_calls(function: Callable[[], object], with_guard: bool = True) -> int:
    """How many functions of lazycell a call runs; the guard of operators before MindSpore 2.9 can be left out."""
    package = str(Path(lazycell.__file__).parent)

    def counts(frame: FrameType) -> bool:
        is_guard = "run_op_async" in (frame.f_code.co_name, frame.f_back.f_code.co_name)
        return frame.f_code.co_filename.startswith(package) and (with_guard or not is_guard)

    return _calls(function, counts)


def all_calls(function: Callable[[], object]) -> int:
    """How many Python functions a call runs, whoever's."""
    return _calls(function, lambda frame: True)
