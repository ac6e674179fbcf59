"""One call of a net that has run before: what laziness costs once everything is settled."""

from __future__ import annotations

import mindspore as ms
from mindspore import nn

import lazycell
from benchmarks import _measure, construction
from benchmarks._results import Results
from benchmarks.training import MODES

LAYERS = {1: 4000, 10: 1200, 100: 200, 1000: 24}  # and rounds


def build(base: type[nn.Cell], live: int, dead: int) -> nn.Cell:
    """A net of live and dead layers that has run."""
    net = construction.build(base, live, dead, 8)
    for _ in range(3):
        net(ms.ops.ones((1, 8)))
    return net


def run() -> Results:
    """Run all of it."""
    results = Results()
    table = results.table(
        "A call of a settled net of Dense(8, 8), to one of a plain net without dead layers (goal: 1.01). Dead layers "
        "are as many as live ones. The net that was built under the patch is called without it, as the others are.",
        "mode", "layers", "LazyCell", "LazyCell, with dead layers", "built under the patch, with dead layers",
        "plain, with dead layers", "plain",
    )  # fmt: skip
    x = ms.ops.ones((1, 8))
    ms.set_recursion_limit(100_000)  # of graphs
    for mode in MODES:
        ms.set_context(mode=MODES[mode], pynative_synchronize=True)
        for layers, rounds in LAYERS.items():
            builds = 1 if mode == "Graph" and layers == 1000 else 4  # each is compiled for about 20 seconds

            def rival(name: str, layers: int = layers) -> _measure.Rival:
                dead = 0 if name in ("plain", "alone, lazy") else layers
                if name == "patched":
                    with lazycell.patch():
                        net = build(nn.Cell, layers, dead)
                else:
                    net = build(lazycell.LazyCell if "lazy" in name else nn.Cell, layers, dead)
                return _measure.timed(lambda: net(x))

            names = ["plain", "alone, lazy", "lazy", "patched", "plain, dead"]
            taken = _measure.rebuilt(rival, names, builds, rounds // builds)
            ratios = [_measure.ratio(taken, name, "plain") for name in names[1:]]
            table.add(mode, str(layers), *ratios, _measure.milliseconds(taken, "plain"))
    return results
