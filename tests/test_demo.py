"""The first report (mindspore-ai/mindspore#309), end to end."""

from __future__ import annotations

import warnings

import mindspore as ms
import numpy as np
import pytest
from helpers import bits, deferred, seed
from mindspore import Tensor, nn

import lazycell
from lazycell._demo import build_model

EIGHT = [f"{layer}.{part}" for layer in ("conv1_mutated", "conv2_mutated", "conv4_mutated", "tail_fc")
         for part in ("weight", "bias")]  # fmt: skip


def step(base: type[nn.Cell]) -> tuple[nn.Cell, dict[str, Tensor], list[warnings.WarningMessage]]:
    """The training step of the report, which reads ``trainable_params()`` twice."""
    seed()
    model = build_model(base)
    image = Tensor(np.random.default_rng(0).random((1, 3, 224, 224), np.float32))
    label = Tensor([3], ms.int32)
    loss_fn = nn.CrossEntropyLoss()

    def forward_fn(image: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
        logits = model(image)  # the user's line
        return loss_fn(logits, label), logits

    grad_fn = ms.value_and_grad(forward_fn, None, model.trainable_params(), has_aux=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _, gradients = grad_fn(image, label)
        pairs = zip(model.trainable_params(), gradients, strict=True)
        named = {parameter.name: gradient for parameter, gradient in pairs}
        grad_fn(image, label)
    ours = [entry for entry in caught if issubclass(entry.category, lazycell.LazyCellWarning)]
    return model, named, ours


@pytest.fixture(scope="module")
def lazy() -> tuple[nn.Cell, dict[str, Tensor], list[warnings.WarningMessage]]:
    """The step on ``LazyCell``."""
    return step(lazycell.LazyCell)


def test_ten_against_eight(lazy) -> None:
    """``nn.Cell`` gives ten gradients, ``LazyCell`` the eight that count, bit for bit."""
    _, eager, silent = step(nn.Cell)
    assert len(eager) == 10 and not silent
    assert list(lazy[1]) == EIGHT
    assert {name: bits(eager[name]) for name in EIGHT} == {name: bits(g) for name, g in lazy[1].items()}


def test_dead_layer_holds_nothing(lazy) -> None:
    """The layer that isn't called has no storage."""
    assert deferred(lazy[0]) == {"conv3_mutated.weight", "conv3_mutated.bias"}
    assert lazycell.registry(lazy[0]).deferred_nbytes == 36


def test_one_warning_at_the_users_line(lazy) -> None:
    """Exactly one warning names both layers, and points at the line that calls the net."""
    (entry,) = lazy[2]
    assert entry.category is lazycell.UnusedLayerWarning
    assert entry.filename == __file__
    lines = open(__file__, encoding="utf-8").read().splitlines()
    assert lines[entry.lineno - 1].endswith("# the user's line")
    message = str(entry.message)
    assert message.startswith("2 layers of Model were defined and never invoked (36 B):\n")
    assert "conv3_mutated (Conv2dTranspose): 9 parameters, 36 B" in message
    assert "relu2_mutated (HSwish): no parameters" in message
    assert "lazycell.optional(layer)" in message
    assert [(r.name, r.num_parameters, r.nbytes) for r in entry.message.layers] == [
        ("conv3_mutated", 9, 36),
        ("relu2_mutated", 0, 0),
    ]
    assert entry.message.nbytes == 36
