"""What each layer costs as nets grow from 100 to 30,000 layers."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable

import mindspore as ms
from mindspore import Tensor, nn

import lazycell
from benchmarks import _measure
from benchmarks._results import Plot, Results

LAYERS = {100: 7, 1000: 5, 10_000: 3, 30_000: 3}  # and rounds


def build(base: type[nn.Cell], layers: int) -> nn.Cell:
    """Many small layers side by side."""

    class Wide(base):
        def __init__(self) -> None:
            super().__init__()
            self.live = nn.CellList([nn.Dense(2, 2) for _ in range(layers)])

        def construct(self, x: Tensor) -> Tensor:
            for layer in self.live:
                layer(x)
            return x

    return Wide()


def once(layers: int) -> dict[str, float]:
    """The seconds of all that is measured, for one net of each kind."""
    x, lazy, plain = ms.ops.ones((1, 2)), [], []
    steps: dict[str, Callable[[], object]] = {
        "construction": lambda: lazy.append(build(lazycell.LazyCell, layers)),
        "construction, MindSpore": lambda: plain.append(build(nn.Cell, layers)),
        "first forward": lambda: lazy[0](x),
        "first forward, MindSpore": lambda: plain[0](x),
        "trainable_params()": lambda: lazy[0].trainable_params(),
        "trainable_params(), MindSpore": lambda: plain[0].trainable_params(),
        "registry()": lambda: lazycell.registry(lazy[0]).layers,
        "report()": lambda: lazycell.report(lazy[0]),
    }
    taken = {}
    for name, step in steps.items():
        gc.collect()
        taken[name] = _measure.timed(step)()
    return taken


def run() -> Results:
    """Run all of it."""
    ms.set_context(pynative_synchronize=True)
    once(100)
    results, micro = Results(), {}
    for layers, rounds in LAYERS.items():
        rows = [once(layers) for _ in range(rounds)]
        micro[layers] = {name: statistics.median(row[name] for row in rows) / layers * 1e6 for name in rows[0]}
        print(layers, micro[layers], flush=True)
    table = results.table(
        "Microseconds per layer, medians, and the largest to the smallest net (goal: 1.3).",
        "what", *(f"{layers} layers" for layers in LAYERS), "growth",
    )  # fmt: skip
    first, last = min(LAYERS), max(LAYERS)
    for name in micro[first]:
        values = [micro[layers][name] for layers in LAYERS]
        table.add(name, *(f"{value:.3g}" for value in values), f"{micro[last][name] / micro[first][name]:.2f}")
    lines = {name: [micro[layers][name] for layers in LAYERS] for name in micro[first]}
    results.plots.append(Plot("Cost of a layer", "layers", "us per layer", list(LAYERS), lines, logarithmic=True))
    return results
