"""One call of a net that has run before: what laziness costs once everything is settled."""

from __future__ import annotations

import mindspore as ms
from mindspore import nn

import lazycell
from benchmarks import _measure, construction
from benchmarks._results import Results
from benchmarks.training import MODES

LAYERS = {1: 1200, 10: 400, 100: 60, 1000: 12}  # and rounds


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
        "A call of a settled net of Dense(8, 8), to plain MindSpore's (goal: 1.01). In PyNative mode the net with dead "
        "layers is compared to plain without them. In Graph mode MindSpore visits every cell in each call, so it is "
        "compared to plain with them.",
        "mode", "layers", "LazyCell", "LazyCell, as many dead layers", "the same, patched", "plain",
    )  # fmt: skip
    x = ms.ops.ones((1, 8))
    ms.set_recursion_limit(100_000)  # of graphs
    for mode in MODES:
        ms.set_context(mode=MODES[mode], pynative_synchronize=True)
        for layers, rounds in LAYERS.items():
            builds = 1 if mode == "Graph" and layers == 1000 else 4  # each is compiled for about 20 seconds

            def rival(name: str, layers: int = layers) -> _measure.Rival:
                dead = 0 if name.startswith("alone") else layers
                if name == "patched":
                    with lazycell.patch():
                        net = build(nn.Cell, layers, dead)
                else:
                    net = build(lazycell.LazyCell if "lazy" in name else nn.Cell, layers, dead)
                return _measure.timed(lambda: net(x))

            names = ["alone, plain", "alone, lazy", "lazy", "patched", *(["plain"] if mode == "Graph" else [])]
            taken = _measure.rebuilt(rival, names, builds, rounds // builds)
            plain = "plain" if mode == "Graph" else "alone, plain"
            ratios = [_measure.ratio(taken, "alone, lazy", "alone, plain")]
            ratios += [_measure.ratio(taken, name, plain) for name in ("lazy", "patched")]
            table.add(mode, str(layers), *ratios, _measure.milliseconds(taken, "alone, plain"))
    return results
