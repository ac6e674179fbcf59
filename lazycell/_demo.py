"""The model of the first report, on ``nn.Cell`` and on ``LazyCell``: ``python -m lazycell demo``."""

from __future__ import annotations

import functools
import textwrap
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import mindspore
import numpy as np
from mindspore import Tensor, nn

from lazycell._cell import LazyCell
from lazycell._errors import UnusedLayerWarning
from lazycell._registry import format_bytes, registry

_WIDTH = 80


def build_model(base: type[nn.Cell]) -> nn.Cell:
    """The mutated model of mindspore-ai/mindspore#309; ``construct`` leaves two of its layers out.

    Args:
        base: ``nn.Cell`` or `LazyCell`.
    """

    class Model(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            transposed = nn.Conv2dTranspose
            self.conv1_mutated = transposed(3, 3, 7, stride=2, pad_mode="pad", padding=0, has_bias=True)
            self.pool1_mutated = nn.MaxPool2d(8, 2, pad_mode="pad")
            self.conv2_mutated = transposed(3, 2, 1, has_bias=True)
            self.relu1_mutated = nn.HSwish()
            self.conv3_mutated = transposed(2, 3, 1, has_bias=True)
            self.relu2_mutated = nn.HSwish()
            self.conv4_mutated = transposed(2, 3, 3, pad_mode="pad", padding=1, has_bias=True)
            self.tail_flatten = nn.Flatten()
            self.tail_fc = nn.Dense(149187, 1000)

        def construct(self, x: Tensor) -> Tensor:
            x = self.pool1_mutated(self.conv1_mutated(x))
            x = self.relu1_mutated(self.conv2_mutated(x))
            x = self.conv4_mutated(x)
            return self.tail_fc(self.tail_flatten(x))

    return Model()


@dataclass
class Step:
    """What one gradient step of one model came to."""

    names: list[str]
    gradients: tuple[Tensor, ...]
    allocated: int
    warnings: list[str]
    table: str = ""


def gradient_step(base: type[nn.Cell]) -> Step:
    """One gradient step on a 224 x 224 image, in the two-reads pattern of the report."""
    mindspore.set_seed(0)
    model = build_model(base)
    image = Tensor(np.random.default_rng(0).random((1, 3, 224, 224), np.float32))
    label = Tensor([3], mindspore.int32)
    loss_fn = nn.CrossEntropyLoss()

    def forward_fn(image: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
        logits = model(image)
        return loss_fn(logits, label), logits

    # Read once here, before anything has run, and once below.
    grad_fn = mindspore.value_and_grad(forward_fn, None, model.trainable_params(), has_aux=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UnusedLayerWarning)
        _, gradients = grad_fn(image, label)
    names = [parameter.name for parameter, _ in zip(model.trainable_params(), gradients)]
    messages = [str(entry.message) for entry in caught if issubclass(entry.category, UnusedLayerWarning)]
    if not isinstance(model, LazyCell):
        return Step(names, gradients, sum(p.nbytes for p in model.get_parameters()), messages)
    view = registry(model)
    return Step(names, gradients, view.allocated_nbytes, messages, str(view))


def _describe(title: str, step: Step) -> str:
    names = textwrap.fill(", ".join(step.names), _WIDTH, initial_indent="  ", subsequent_indent="  ")
    return (
        f"{title}: {len(step.names)} gradients, {format_bytes(step.allocated)} ({step.allocated:,} bytes) "
        f"of parameters\n{names}"
    )


def _identical(eager: Step, lazy: Step) -> bool:
    twins = dict(zip(eager.names, eager.gradients))
    return all(np.array_equal(twins[name].asnumpy(), g.asnumpy()) for name, g in zip(lazy.names, lazy.gradients))


def demo(write: Callable[[str], object] = functools.partial(print, flush=True)) -> int:
    """Run the demonstration; returns the exit code.

    Args:
        write: Called with each block of text.
    """
    write("One gradient step of a model with two layers that construct() never calls.\n")
    eager = gradient_step(nn.Cell)
    write(_describe("nn.Cell ", eager) + "\n")
    lazy = gradient_step(LazyCell)
    write(_describe("LazyCell", lazy) + "\n")
    same = _identical(eager, lazy)
    write(f"The gradients of the {len(lazy.names)} are {'' if same else 'NOT '}bit-identical.\n")
    for message in lazy.warnings:
        write(f"UnusedLayerWarning: {message}\n")
    write(lazy.table)
    return 0 if same else 1
