"""A training step with k dead branches beside a live one, Adam with weight decay."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn

import lazycell
from benchmarks import _measure, outside
from benchmarks._results import Plot, Results

DEAD = (0, 1, 4, 16)
WIDTH, DEPTH, BATCH = 512, 4, 64
LARGE = 1024  # for memory
# MindSpore hands operators over to other threads, which on few cores costs more than small operators themselves, and
# varies. Without that, what Python does shows.
STEPS = (
    ("PyNative", WIDTH), ("PyNative, synchronous", WIDTH), ("PyNative, synchronous", LARGE), ("Graph", WIDTH),
    ("Graph, the whole step", WIDTH),
)  # fmt: skip
MODES = {"PyNative": ms.PYNATIVE_MODE, "Graph": ms.GRAPH_MODE}
RIVALS = ("LazyCell", "hand-pruned", "eager")
MB = 2**20


def branch(width: int) -> nn.Cell:
    """Dense layers with ReLU."""
    return nn.SequentialCell([nn.SequentialCell(nn.Dense(width, width), nn.ReLU()) for _ in range(DEPTH)])


def build(base: type[nn.Cell], dead: int, width: int = WIDTH) -> nn.Cell:
    """A net of one live branch and dead ones."""

    class Net(base):
        def __init__(self) -> None:
            super().__init__()
            self.live = branch(width)
            self.dead = nn.CellList([branch(width) for _ in range(dead)])

        def construct(self, x: Tensor) -> Tensor:
            return self.live(x)

    return Net()


def training(rival: str, dead: int, width: int = WIDTH) -> tuple[Callable[[], object], nn.Cell]:
    """The usual loop's step, run three times, and its optimizer."""
    ms.set_seed(0)
    net = build(lazycell.LazyCell if rival == "LazyCell" else nn.Cell, 0 if rival == "hand-pruned" else dead, width)
    x = Tensor(np.random.default_rng(0).random((BATCH, width), np.float32))

    def forward(x: Tensor) -> Tensor:
        return net(x).mean()

    weights = net.trainable_params()
    if rival == "LazyCell":
        optimizer = lazycell.LazyOptimizer(nn.AdamWeightDecay, weights, 1e-3, weight_decay=0.01)
        grad = lazycell.value_and_grad(forward, None, weights)
    else:
        optimizer = nn.AdamWeightDecay(weights, 1e-3, weight_decay=0.01)
        grad = ms.value_and_grad(forward, None, optimizer.parameters)

    def step() -> None:
        _, grads = grad(x)
        optimizer(grads)
        weights[-1].asnumpy()  # the last of what was asked for

    for _ in range(3):
        step()
    return step, optimizer


def whole_graph(rival: str, dead: int, width: int = WIDTH) -> Callable[[], object]:
    """The same as one graph, `TrainOneStepCell`."""
    ms.set_seed(0)
    net = build(lazycell.LazyCell if rival == "LazyCell" else nn.Cell, 0 if rival == "hand-pruned" else dead, width)
    x = Tensor(np.random.default_rng(0).random((BATCH, width), np.float32))
    if rival == "LazyCell":
        lazycell.dry_run(net, x)
    optimizer = nn.AdamWeightDecay(net.trainable_params(), 1e-3, weight_decay=0.01)
    train = nn.TrainOneStepCell(nn.SequentialCell(net, Mean()), optimizer)
    train.set_train()

    def step() -> None:
        train(x)
        optimizer.parameters[-1].asnumpy()

    for _ in range(3):
        step()
    return step


class Mean(nn.Cell):
    """The loss."""

    def construct(self, x: Tensor) -> Tensor:
        return x.mean()


def optimizer_bytes(optimizer: nn.Cell) -> int:
    """What an optimizer keeps besides the weights."""
    weights = {id(p) for p in optimizer.parameters}
    return sum(p.nbytes for p in optimizer.get_parameters() if id(p) not in weights and p.size > 1)


def memory(rival: str, dead: int, mode: str) -> tuple[int, int]:
    """How far building and three steps raise this process's peak, and the optimizer's bytes."""
    ms.set_context(mode=MODES[mode])
    training(rival, 1, 8)
    made: list[nn.Cell] = []
    peak = _measure.peak(lambda: made.append(training(rival, dead, LARGE)[1]))
    return peak, optimizer_bytes(made[0])


def agree(steps: dict[str, tuple[Callable[[], object], nn.Cell]]) -> None:
    """The rivals' live weights are the same bits."""
    limit = [p.asnumpy() for p in steps["hand-pruned"][1].parameters]
    for name in ("LazyCell", "eager"):
        live = [p for p in steps[name][1].parameters if p.name.startswith("live")]
        assert all((p.asnumpy() == q).all() for p, q in zip(live, limit, strict=True)), name


def rounds(step: str, width: int, dead: int) -> _measure.Times:
    """Steps of the three by turns; in a process of its own, since MindSpore never frees an optimizer."""
    ms.set_context(mode=MODES[step.split(",")[0]], pynative_synchronize="synchronous" in step)
    agree({rival: training(rival, dead, width) for rival in RIVALS})

    def build(name: str) -> _measure.Rival:
        return _measure.timed(whole_graph(name, dead, width) if "whole" in step else training(name, dead, width)[0])

    taken = _measure.rebuilt(build, ("LazyCell", "hand-pruned"), 4, 50)
    beside = _measure.rebuilt(build, ("eager", "hand-pruned"), 1, 20)  # it sweeps the caches: not among the others
    return taken | {"eager": beside["eager"], "hand-pruned, beside eager": beside["hand-pruned"]}


def rounds_of_torch(dead: int) -> _measure.Times:
    """Steps of PyTorch with dead branches and without, by turns."""
    with ExitStack() as stack:
        rivals = {}
        for name, branches in (("PyTorch", dead), ("PyTorch, pruned", 0)):
            worker = stack.enter_context(_measure.Worker(mindspore=False))
            rivals[name] = worker.hold(outside.torch_training, branches, WIDTH, DEPTH, BATCH)
        return _measure.interleaved(rivals, 200)


def times(results: Results) -> None:
    """Steps by turns."""
    table = results.table(
        f"A step on one live branch of {DEPTH} Dense layers with ReLU, batch {BATCH}, and k dead ones: time to the "
        "hand-pruned net's (goal: 1.02). PyTorch: with dead branches to without.",
        "step", "width", "k", "LazyCell", "eager", "PyTorch", "hand-pruned",
    )  # fmt: skip
    limits = {"LazyCell": "hand-pruned", "eager": "hand-pruned, beside eager", "PyTorch": "PyTorch, pruned"}
    for step, width in STEPS:
        lines: dict[str, list[float]] = {}
        for dead in DEAD:
            taken = _measure.in_process(rounds, step, width, dead)
            if step == STEPS[0][0] and _measure.is_installed("torch"):
                taken |= rounds_of_torch(dead)
            row = {rival: "" for rival in limits}
            row |= {rival: _measure.ratio(taken, rival, limit) for rival, limit in limits.items() if rival in taken}
            table.add(step, str(width), str(dead), *row.values(), _measure.milliseconds(taken, "hand-pruned"))
            for rival, limit in limits.items():
                if rival in taken:
                    values = _measure.ratios(taken, rival, limit)
                    lines.setdefault(rival, []).append(_measure.spread(values)[1])
        title = f"Time of a training step, {step}, width {width}"
        results.plots.append(Plot(title, "dead branches", "to hand-pruned", DEAD, lines))


def memories(results: Results) -> None:
    """Peaks and optimizer bytes in processes of their own."""
    table = results.table(
        f"Peak memory of building such a net of Dense({LARGE}) and three steps, and bytes of the optimizer, each in a "
        "process of its own. MB; in brackets LazyCell's ratio to hand-pruned (goal: 1.02).",
        "mode", "k", "LazyCell", "hand-pruned", "eager", "PyTorch", "optimizer: LazyCell", "hand-pruned", "eager",
    )  # fmt: skip
    for mode in MODES:
        for dead in DEAD:
            peaks, optimizers = zip(*(_measure.in_process(memory, rival, dead, mode) for rival in RIVALS), strict=True)
            torch = ""
            if mode == "PyNative" and _measure.is_installed("torch"):
                args = (outside.torch_training_peak, dead, LARGE, DEPTH, BATCH)
                torch = f"{_measure.in_process(*args, mindspore=False) / MB:.1f}"
            cells = [[f"{value / MB:.1f}" for value in values] for values in (peaks, optimizers)]
            for row, values in zip(cells, (peaks, optimizers), strict=True):
                row[0] += f" ({values[0] / values[1]:.3f})"
            table.add(mode, str(dead), *cells[0], torch, *cells[1])


def run() -> Results:
    """Run all of it."""
    results = Results()
    times(results)
    memories(results)
    return results
