"""Real models, unmodified, with and without the patch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn

import lazycell
from benchmarks import _measure, training
from benchmarks._results import Results

MODELS = {"resnet50": (4, 64), "googlenet": (4, 96), "vit_b_32_224": (4, 224)}  # batch and size of images
RIVALS = ("patched", "plain")
MB = 2**20


def inputs(model: str, batch: int | None = None) -> tuple[Tensor, Tensor]:
    """Images and labels."""
    random, (usual, size) = np.random.default_rng(0), MODELS[model]
    batch = batch or usual
    images = random.random((batch, 3, size, size), np.float32)
    return Tensor(images), Tensor(random.integers(0, 10, batch).astype(np.int32))


def create(model: str) -> nn.Cell:
    """The model; googlenet with its auxiliary heads, switched off, as one fine-tunes it."""
    from mindcv.models import create_model

    if model != "googlenet":
        return create_model(model, num_classes=10)
    net = create_model(model, num_classes=10, aux_logits=True)
    net.aux_logits = False
    return net


def script(model: str, x: Tensor, y: Tensor) -> tuple[nn.Cell, Callable[[], Any], nn.Cell]:
    """The usual loop, as its author wrote it: net, step, optimizer."""
    ms.set_seed(0)
    np.random.seed(0)
    net = create(model)
    net.set_train()
    loss_fn = nn.CrossEntropyLoss()

    def forward(x: Tensor, y: Tensor) -> Tensor:
        return loss_fn(net(x), y)

    optimizer = nn.AdamWeightDecay(net.trainable_params(), 1e-3, weight_decay=0.01)
    grad = ms.value_and_grad(forward, None, optimizer.parameters)

    def step() -> Any:
        loss, grads = grad(x, y)
        optimizer(grads)
        return loss.asnumpy()

    return net, step, optimizer


def under(rival: str) -> Any:
    """What the script runs under."""
    return lazycell.patch() if rival == "patched" else nullcontext()


def memory(model: str, rival: str) -> tuple[int, int, int]:
    """How far building and two steps raise this process's peak; the bytes of the weights, and of the optimizer."""
    x, y = inputs(model)
    made: list[Any] = []

    def work() -> None:
        made.extend(script(model, x, y))
        made[1]()
        made[1]()

    with under(rival):
        peak = _measure.peak(work)
        net, _, optimizer = made
        if rival == "patched":
            weights = lazycell.registry(net).allocated_nbytes
        else:
            weights = sum(parameter.nbytes for parameter in net.get_parameters())
    return peak, weights, training.optimizer_bytes(optimizer)


def construction(model: str, rival: str) -> Callable[[], object]:
    """Building a model."""

    def build() -> None:
        with under(rival):  # timed with it
            create(model)

    build()
    return build


def run() -> Results:
    """Run all of it."""
    ms.set_context(pynative_synchronize=True)
    results = Results()
    time = results.table(
        "mindcv's models, AdamWeightDecay, the usual loop: time under the patch to without. `patch()` itself is "
        "counted in construction. The first step includes building, and compiling the optimizer.",
        "model", "batch", "construction", "build and first step", "steady step", "steady step, plain",
    )  # fmt: skip
    for model, (batch, size) in MODELS.items():
        x, y = inputs(model)
        built = _measure.rebuilt(lambda rival: _measure.timed(construction(model, rival)), RIVALS, 1, 5)  # noqa: B023
        steps: dict[str, Callable[[], Any]] = {}

        def first(rival: str) -> _measure.Rival:
            def work() -> None:
                with under(rival):
                    steps[rival] = script(model, x, y)[1]  # noqa: B023
                    steps[rival]()  # noqa: B023

            return _measure.timed(work)

        firsts = _measure.rebuilt(first, RIVALS, 1, 3)
        for _ in range(2):
            losses = [steps[rival]() for rival in RIVALS]  # MindSpore's own vary in the last bits from run to run
            assert np.allclose(*losses, rtol=1e-4), losses
        steady = _measure.interleaved({rival: _measure.timed(steps[rival]) for rival in RIVALS}, 5)
        ratios = [_measure.ratio(taken, *RIVALS) for taken in (built, firsts, steady)]
        time.add(model, f"{batch} of (3, {size}, {size})", *ratios, _measure.milliseconds(steady, "plain"))
    space = results.table(
        "The same: bytes after two steps, MB, and peak memory of building and two steps, each in a process of its own; "
        "medians of three.",
        "model", "weights: patched", "plain", "optimizer: patched", "plain", "peak: patched", "plain", "peak, ratio",
    )  # fmt: skip
    for model in MODELS:
        found: dict[str, list[tuple[int, int, int]]] = {rival: [] for rival in RIVALS}
        for rival in RIVALS * 3:  # when garbage goes makes a difference of up to 20 %
            found[rival].append(_measure.in_process(memory, model, rival))
        peaks, weights, moments = zip(*(sorted(found[rival])[1] for rival in RIVALS), strict=True)
        cells = [f"{value / MB:.1f}" for pair in (weights, moments, peaks) for value in pair]
        space.add(model, *cells, f"{peaks[0] / peaks[1]:.3f}")
    return results
