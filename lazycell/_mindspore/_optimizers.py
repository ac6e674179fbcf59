"""MindSpore's optimizers: what is one, and what their classes take."""

from __future__ import annotations

import inspect
from types import FunctionType
from typing import Any

import mindspore
from mindspore import nn
from mindspore.experimental import optim
from mindspore.nn.learning_rate_schedule import LearningRateSchedule

LOAD = mindspore.load_param_into_net  # whatever patch() puts in its place
OPTIMIZERS = (nn.Optimizer, optim.Optimizer)  # mint.optim's derive from the second


def is_optimizer_class(kind: type) -> bool:
    """Whether a class is one of optimizers. They hold parameters of others, and are no layers."""
    return issubclass(kind, OPTIMIZERS)


def has_groups(kind: type) -> bool:
    """Whether an optimizer's class keeps its options in ``param_groups``, where schedulers change them."""
    return issubclass(kind, optim.Optimizer)


def is_librarys(kind: type) -> bool:
    """Whether a class is MindSpore's own."""
    return kind.__module__.startswith("mindspore.")


def is_layer_class(kind: type) -> bool:
    """Whether a class of cells is one of layers, rather than of optimizers and of what they are built of."""
    return not issubclass(kind, (*OPTIMIZERS, LearningRateSchedule))


def takes_parameters_first(kind: type) -> bool:
    """Whether an optimizer's class takes the parameters to update as its first argument, as MindSpore's own do.

    Not so: ``nn.LARS``, which takes another optimizer, and ``nn.thor``, which takes a net.
    """
    init: Any = kind.__init__  # type: ignore[misc]
    while init is not None:
        names = list(inspect.signature(init).parameters)[1:2]
        if names != ["args"]:
            return names in (["params"], ["parameters"])
        init = _decorated(init)
    return False


def _decorated(function: Any) -> Any:
    """The function that a decorator hides in its closure; MindSpore's own decorator of constructors leaves no trace."""
    held = (cell.cell_contents for cell in getattr(function, "__closure__", None) or ())
    return next((value for value in held if isinstance(value, FunctionType)), None)
