"""Initializers, and the random numbers they draw."""

from __future__ import annotations

import copy
import importlib.util
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import mindspore
import numpy as np
from mindspore import Parameter, Tensor
from mindspore.common import initializer as _initializers
from mindspore.common.initializer import Initializer

# Draws from NumPy's global stream: none, or exactly one seed (initializer._numpy_seed). Anything else,
# Sparse and users' own initializers included, is drawn when it is built. A test checks both sets.
_NO_DRAW = frozenset(("Zero", "One", "Constant", "Identity", "Dirac"))
_ONE_DRAW = frozenset(
    (
        "Normal", "Uniform", "TruncatedNormal", "XavierNormal", "XavierUniform",
        "HeNormal", "HeUniform", "Orthogonal", "VarianceScaling",
    )
)  # fmt: skip


def random_state() -> tuple[Any, Any]:
    """Where the global random streams stand that layers draw from as they are built."""
    return np.random.get_state(), mindspore.get_rng_state()


def set_random_state(state: tuple[Any, Any]) -> None:
    """Put the global random streams where they stood."""
    np.random.set_state(state[0])
    mindspore.set_rng_state(state[1])


def _definition(init: Initializer) -> str | None:
    """The MindSpore class whose ``_initialize`` an initializer runs, or None for a user's own."""
    if type(init).__call__ is not Initializer.__call__:
        return None
    function = type(init)._initialize
    if function.__module__ != _initializers.__name__:
        return None
    return str(function.__qualname__.partition(".")[0])


class _Replay(threading.local):
    seed: int = 0


_replay = _Replay()
_recorded_classes: dict[type, type] = {}


def _load_replaying_module() -> ModuleType:
    """A private copy of MindSpore's initializers whose seed is the recorded one.

    Neither MindSpore's own module nor NumPy's global stream is touched while values are drawn, so
    other threads draw undisturbed.
    """
    spec = importlib.util.spec_from_file_location("lazycell._replaying_initializers", _initializers.__file__)
    if spec is None or spec.loader is None:  # pragma: no cover  (MindSpore without Python sources)
        raise ImportError("mindspore.common.initializer has no source to read")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module._numpy_seed = lambda: _replay.seed  # type: ignore[attr-defined]
    return module


_replaying: list[ModuleType] = []


def _replay_values(init: Initializer, array: np.ndarray[Any, Any]) -> None:
    if not _replaying:
        _replaying.append(_load_replaying_module())
    _replay.seed = init._lazycell_seed
    getattr(_replaying[0], init._lazycell_recorded)._initialize(init, array)


def _recorded_class(kind: type) -> type:
    """A subclass of an initializer's class that draws from the seed recorded in the instance."""
    if kind not in _recorded_classes:
        namespace = {"_initialize": _replay_values, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
        _recorded_classes[kind] = type(kind.__name__, (kind,), namespace)
    return _recorded_classes[kind]


def record_draw(tensor: Tensor) -> bool:
    """Draw the seed of a tensor's initializer now, for values that are computed later.

    The tensor gets an initializer of its own, which no later change to the given one can reach.

    Returns:
        False if the initializer isn't known to draw nothing or one seed; nothing was drawn then.
    """
    init = tensor.init
    if hasattr(init, "_lazycell_recorded"):
        return True
    definition = _definition(init) if isinstance(init, Initializer) else None
    if definition not in _NO_DRAW | _ONE_DRAW:
        return False
    recorded = copy.copy(init)
    recorded._lazycell_recorded = definition
    if definition in _ONE_DRAW:
        recorded.__class__ = _recorded_class(type(init))
        recorded._lazycell_seed = int(_initializers._numpy_seed())
    tensor.init = recorded
    return True


def seed_of(parameter: Parameter) -> int | None:
    """The seed that a parameter without storage will draw from; 0 if it draws nothing, None if it has no seed."""
    init = parameter.init_mode.init
    if getattr(init, "_lazycell_recorded", None) not in _NO_DRAW | _ONE_DRAW:
        return None
    return getattr(init, "_lazycell_seed", 0)


def with_seed(init: Initializer, seed: int) -> Initializer:
    """An initializer like another one, which `record_draw` has made, that draws from another seed."""
    other = copy.copy(init)
    other._lazycell_seed = seed
    return other


class KeptValues(Initializer):  # type: ignore[misc]
    """An initializer that brings back values known beforehand."""

    _lazycell_recorded = "KeptValues"

    def __init__(self, fill: Callable[[np.ndarray[Any, Any]], None]) -> None:
        super().__init__()
        self._fill = fill

    def _initialize(self, array: np.ndarray[Any, Any]) -> None:
        self._fill(array)

    def __deepcopy__(self, memo: dict[int, Any]) -> KeptValues:
        return self
