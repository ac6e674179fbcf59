"""A gradient step with the first s stages frozen: MindSpore as it is, lazycell, and the limit; PyTorch and JAX beside.

The limit is the frozen trunk run outside the differentiated function.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn

import lazycell
from benchmarks import _measure, _results, outside
from benchmarks._results import Plot, Results
from benchmarks.training import MODES

RIVALS = ("lazycell", "MindSpore", "the limit")
Step = Callable[[Tensor], "tuple[Tensor, ...]"]


class Chain(lazycell.LazyCell):
    """Stages that run one after the other; from ``start`` on, if that is asked."""

    def __init__(self, stages: list[nn.Cell]) -> None:
        super().__init__()
        self.stages = nn.CellList(stages)

    def construct(self, x: Tensor, start: int = 0, end: int | None = None) -> Tensor:
        for stage in self.stages[start:end]:
            x = stage(x)
        return x


class Mlp(Chain):
    """12 x Dense(768) with ReLU."""

    batch, shape, stages_count, rounds, larger = 128, (768,), 12, 24, 32

    def __init__(self) -> None:
        super().__init__([nn.SequentialCell(nn.Dense(768, 768), nn.ReLU()) for _ in range(12)])


class Conv(Chain):
    """6 x Conv2d(32) with ReLU."""

    batch, shape, stages_count, rounds, larger = 4, (3, 32, 32), 6, 8, 8

    def __init__(self) -> None:
        convs = [nn.Conv2d(32 if index else 3, 32, 3, has_bias=True) for index in range(6)]
        super().__init__([nn.SequentialCell(conv, nn.ReLU()) for conv in convs])


NETS: dict[str, Any] = {"MLP": Mlp, "conv net": Conv}


def images(net: str, factor: int = 1) -> Tensor:
    """A batch."""
    kind = NETS[net]
    return Tensor(np.random.default_rng(0).random((kind.batch * factor, *kind.shape), np.float32))


def steps(net: str, frozen: int) -> dict[str, Step]:
    """A gradient step of each rival, over one net whose first stages are frozen."""
    ms.set_seed(0)
    chain = NETS[net]()
    chain.set_train(False)  # the limit runs the trunk in a call of its own, which would move statistics
    chain(images(net))
    if frozen:
        lazycell.freeze(*chain.stages[:frozen])
    weights = list(chain.trainable_params())

    def whole(x: Tensor) -> Tensor:
        return chain(x).sum()

    class Trunk(nn.Cell):
        def construct(self, x: Tensor) -> Tensor:
            return chain(x, 0, frozen)

    def head(h: Tensor) -> Tensor:
        return chain(h, frozen).sum()

    def done(result: tuple[Tensor, tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        result[1][0].asnumpy()  # the last that is computed
        return result[1]

    trunk, head_grad = Trunk(), ms.value_and_grad(head, None, weights)
    native, lazy = ms.value_and_grad(whole, None, weights), lazycell.value_and_grad(whole, None, weights)
    return {
        "lazycell": lambda x: done(lazy(x)),
        "MindSpore": lambda x: done(native(x)),
        "the limit": lambda x: done(head_grad(trunk(x) if frozen else x)),
    }


def agree(made: dict[str, Step], x: Tensor) -> None:
    """All rivals give the same bits."""
    for one, *others in zip(*(step(x) for step in made.values()), strict=True):
        assert all((one.asnumpy() == other.asnumpy()).all() for other in others)


def peak(net: str, mode: str, frozen: int, rival: str) -> int:
    """How far the first step on a larger batch raises this process's peak: MindSpore's pool never shrinks."""
    ms.set_context(mode=MODES[mode], pynative_synchronize=True)
    step, large = steps(net, frozen)[rival], images(net, NETS[net].larger)
    step(images(net))
    return _measure.peak(lambda: step(large))


def peaks(net: str, mode: str, frozen: int) -> dict[str, int]:
    """The same for every rival, each in a process of its own."""
    return {rival: _measure.in_process(peak, net, mode, frozen, rival) for rival in RIVALS}


def outsiders(net: str, frozen: int, stack: ExitStack) -> dict[str, _measure.Rival]:
    """PyTorch and JAX, where they are installed."""
    found = {"PyTorch": ("torch", outside.torch_freezing), "JAX": ("jax", outside.jax_freezing)}
    return {
        name: stack.enter_context(_measure.Worker(mindspore=False)).hold(build, net, frozen, NETS[net].batch)
        for name, (framework, build) in found.items()
        if _measure.is_installed(framework)
    }


def measure(results: Results, net: str, mode: str) -> None:
    """All depths of one net in one mode."""
    kind = NETS[net]
    ms.set_context(mode=MODES[mode], pynative_synchronize=True)
    stages, x = kind.stages_count, images(net)
    table = results.table(
        f"{net}, {mode} mode: {kind.__doc__.rstrip('.')}, batch {kind.batch} of {kind.shape}. Time and memory of a "
        f"gradient step to the limit (goal: 1.05); memory with {kind.larger} times the batch. Gradients of all three "
        "are the same bits.",
        "frozen", "time: lazycell", "MindSpore", "the limit", "peak memory: lazycell", "MindSpore",
    )  # fmt: skip
    lines: dict[str, list[float]] = {}
    with ThreadPoolExecutor(2) as pool:  # memory doesn't mind company
        weighed = list(pool.map(functools.partial(peaks, net, mode), range(stages)))
    for frozen in range(stages):

        def build(frozen: int = frozen) -> dict[str, _measure.Rival]:
            made = steps(net, frozen)
            agree(made, x)
            return {rival: _measure.timed(functools.partial(step, x)) for rival, step in made.items()}

        taken: _measure.Times = {}
        for _ in range(2):  # builds
            for name, values in _measure.interleaved(build(), kind.rounds).items():
                taken.setdefault(name, []).extend(values)
        if mode == "PyNative":  # not among the others: their threads go on spinning for a while
            with ExitStack() as stack:
                taken |= _measure.interleaved(outsiders(net, frozen, stack), kind.rounds)
        least = weighed[frozen]["the limit"]
        memory = [f"{weighed[frozen][rival] / least:.2f}" for rival in RIVALS[:2]]
        ratios = [_measure.ratio(taken, rival, "the limit") for rival in RIVALS[:2]]
        table.add(f"{frozen} of {stages}", *ratios, _measure.milliseconds(taken, "the limit"), *memory)
        for name, values in taken.items():
            lines.setdefault(name, []).append(_measure.spread(values)[1])
    shares = {name: [value / values[0] for value in values] for name, values in lines.items()}
    shares["flat, as reported of Flux"] = [1.0] * stages
    title, depths = f"A gradient step, {net}, {mode} mode", list(range(stages))
    results.plots.append(Plot(title, "frozen stages", "to the full step", depths, shares))


def run() -> Results:
    """Run all of it."""
    results = Results()
    for mode in MODES:
        for net in NETS:
            measure(results, net, mode)
            _results.save("freezing", results)  # it takes long
    return results
