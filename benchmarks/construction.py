"""Building nets with a growing share of dead layers, and calling them for the first time."""

from __future__ import annotations

from collections.abc import Callable

import mindspore as ms
from mindspore import Tensor, nn

import lazycell
from benchmarks import _measure, outside
from benchmarks._results import Plot, Results

LAYERS, WIDTH, LARGE = 32, 1024, 4096
DEAD = (0, 8, 16, 24, 31)
MB = 2**20


def build(base: type[nn.Cell], live: int, dead: int, width: int = WIDTH) -> nn.Cell:
    """A net of square Dense layers, of which only the first ones are called."""

    class Net(base):
        def __init__(self) -> None:
            super().__init__()
            self.live = nn.SequentialCell([nn.Dense(width, width) for _ in range(live)])
            self.dead = nn.SequentialCell([nn.Dense(width, width) for _ in range(dead)])

        def construct(self, x: Tensor) -> Tensor:
            return self.live(x)

    return Net()


def build_on_meta(live: int, dead: int, width: int = WIDTH) -> nn.Cell:
    """The same on MindSpore's meta device (2.9 and later)."""
    with ms.DeviceCtx("meta"):
        return build(nn.Cell, live, dead, width)


def peak(kind: str, live: int, dead: int) -> int:
    """How far building large layers, and a first call where there can be one, raise this process's peak."""
    build(nn.Cell, 1, 1, 8)(ms.ops.ones((1, 8)))  # what MindSpore itself loads on its first call
    build(lazycell.LazyCell, 1, 1, 8)(ms.ops.ones((1, 8)))

    def work() -> None:
        if kind == "meta device":
            build_on_meta(live, dead, LARGE)
        else:
            build(nn.Cell if kind == "eager" else lazycell.LazyCell, live, dead, LARGE)(ms.ops.ones((1, LARGE)))

    return _measure.peak(work)


OUTSIDE = {
    "torch eager": ("torch", outside.torch_construction, False),
    "torch meta": ("torch", outside.torch_construction, True),
    "Paddle eager": ("paddle", outside.paddle_construction, False),
    "Paddle LazyGuard": ("paddle", outside.paddle_construction, True),
}


def times(results: Results) -> None:
    """Building alone."""
    table = results.table(
        f"Building {LAYERS} x Dense({WIDTH}, {WIDTH}), medians, and the ratio to the meta device (goal: 1.5) by turns.",
        "dead layers", "LazyCell to the meta device", "LazyCell", "meta device", "eager", *OUTSIDE,
    )  # fmt: skip
    lines: dict[str, list[float]] = {}
    for dead in DEAD:
        live = LAYERS - dead
        workers = {name: _measure.Worker(False) for name, row in OUTSIDE.items() if _measure.is_installed(row[0])}
        others = {
            name: worker.hold(OUTSIDE[name][1], live, dead, WIDTH, OUTSIDE[name][2]) for name, worker in workers.items()
        }
        fast: dict[str, Callable[[], float]] = {
            "LazyCell": _measure.timed(lambda: build(lazycell.LazyCell, live, dead)),  # noqa: B023
            "meta device": _measure.timed(lambda: build_on_meta(live, dead)),  # noqa: B023
        }
        slow = {"eager": _measure.timed(lambda: build(nn.Cell, live, dead))}  # noqa: B023
        for name, rival in others.items():
            (slow if "eager" in name else fast)[name] = rival
        taken = _measure.interleaved(fast, 41) | _measure.interleaved(slow, 5)
        for worker in workers.values():
            worker.__exit__()
        names = ("LazyCell", "meta device", "eager", *OUTSIDE)
        table.add(f"{dead} of {LAYERS}", _measure.ratio(taken, "LazyCell", "meta device"),
                  *(_measure.milliseconds(taken, name) for name in names))  # fmt: skip
        for name in names:
            if name in taken:
                lines.setdefault(name, []).append(_measure.spread(taken[name])[1] * 1e3)
    results.plots.append(
        Plot(f"Building {LAYERS} x Dense({WIDTH}, {WIDTH})", "dead layers", "ms", DEAD, lines, logarithmic=True)
    )


def memory(results: Results) -> None:
    """Building and a first call, in processes of their own."""
    layer = (LARGE * LARGE + LARGE) * 4
    table = results.table(
        f"Peak memory of building {LAYERS} x Dense({LARGE}, {LARGE}) and calling the live ones once, MB, each in a "
        "process of its own. The last column is what LazyCell holds more than a net without the dead layers, by the "
        "dead layers' bytes (goal: 0.1 %). The meta device can't be called; Paddle initializes the live layers.",
        "dead layers", "LazyCell", "without the dead layers", "meta device (building only)", "eager", *OUTSIDE,
        "dead bytes held by LazyCell",
    )  # fmt: skip
    for dead in DEAD[1:]:
        live = LAYERS - dead
        lazy, pruned = (_measure.in_process(peak, kind, live, n) for kind, n in (("LazyCell", dead), ("eager", 0)))
        row = [lazy, pruned, *(_measure.in_process(peak, kind, live, dead) for kind in ("meta device", "eager"))]
        for framework, function, lazily in OUTSIDE.values():
            if _measure.is_installed(framework):
                row.append(
                    _measure.in_process(outside.peak, function, (live, dead, LARGE, lazily, True), mindspore=False)
                )
            else:
                row.append(None)
        cells = ["not installed" if peak is None else f"{peak / MB:.1f}" for peak in row]
        table.add(f"{dead} of {LAYERS}", *cells, f"{(lazy - pruned) / (dead * layer):.4%}")


def run() -> Results:
    """Run all of it."""
    results = Results()
    times(results)
    memory(results)
    return results
