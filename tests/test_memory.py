"""Dead layers cost no memory, and settled ones no operations: counted, never timed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext

import mindspore as ms
import pytest
from helpers import all_calls, lazycell_calls, ones
from mindspore import Tensor, nn

import lazycell
from lazycell import _listed, _mindspore, _tracking

DEAD_GIANTS = """
import warnings
import mindspore as ms
import psutil
from mindspore import Tensor, nn
import lazycell
warnings.simplefilter("ignore")
ms.set_device({device!r})

def resident():
    return psutil.Process().memory_info().rss

class Net(lazycell.LazyCell):
    def __init__(self, giants):
        super().__init__()
        self.body = nn.Dense(8, 8)
        if giants:
            self.dead1 = nn.Dense(16384, 16384)
            self.dead2 = nn.Dense(16384, 16384)
    def construct(self, x):
        return self.body(x)

def train(net):
    x = ms.ops.ones((4, 8))
    live = net.trainable_params()
    step = ms.value_and_grad(lambda x: net(x).sum(), None, live)
    _, gradients = step(x)
    optimizer = nn.Adam(net.trainable_params(), 0.1, weight_decay=0.01)
    for _ in range(3):
        _, gradients = step(x)
        optimizer(gradients)
    str(net), list(net.get_parameters()), str(lazycell.registry(net))

train(Net(False))  # operators and their libraries are loaded by this
before = resident()
train(Net(True))
print((resident() - before) / 2**20)
"""


def test_dead_giants(request: pytest.FixtureRequest) -> None:
    """Two dead layers of 1 GB each: all of training raises the process's memory by less than 100 MB."""
    script = DEAD_GIANTS.format(device=request.config.getoption("--device-target"))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=300)
    assert float(done.stdout.split()[-1]) < 100


class Net(lazycell.LazyCell):
    """A net of many live layers, and as many dead ones."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.live = nn.CellList([nn.Dense(2, 2) for _ in range(layers)])
        self.dead = nn.CellList([nn.Dense(2, 2) for _ in range(layers)])

    def construct(self, x: Tensor) -> Tensor:
        for layer in self.live:
            x = layer(x)
        return x


@pytest.mark.filterwarnings("ignore::lazycell.UnusedLayerWarning")
def test_a_settled_net_runs_nothing_of_lazycell() -> None:
    """Dead layers or not, a call of a settled net is MindSpore's own."""
    net = Net(5)
    net(ones(1, 2))
    if _mindspore.OPERATORS_ASK:  # before that, some operators pass through a guard
        assert lazycell_calls(lambda: net(ones(1, 2))) == 0
    assert not any(map(_tracking.is_watched, [net, *net.live]))


class Mean(nn.Cell):
    """A loss."""

    def construct(self, x: Tensor) -> Tensor:
        return x.mean()


def branches(base: type[nn.Cell], dead: int) -> nn.Cell:
    """A net with one live layer and some dead ones, all of them trainable."""

    class Branches(base):
        def __init__(self) -> None:
            super().__init__()
            self.live = nn.Dense(2, 2)
            self.dead = nn.CellList([nn.Dense(2, 2) for _ in range(dead)])

        def construct(self, x: Tensor) -> Tensor:
            return self.live(x)

    return Branches()


def settled_graph(base: type[nn.Cell], dead: int, trains: bool) -> Callable[[], object]:
    """A call of a net in Graph mode, or of a whole training step, that has been compiled."""
    net, x = branches(base, dead), ones(1, 2)
    called = net
    if trains:
        lazycell.dry_run(net, x)
        called = nn.TrainOneStepCell(nn.SequentialCell(net, Mean()), nn.Momentum(net.trainable_params(), 0.1, 0.9))
    called(x)
    return lambda: called(x)


@pytest.mark.filterwarnings("ignore::lazycell.UnusedLayerWarning")
@pytest.mark.parametrize("trains", [False, True], ids=["forward", "training"])
@pytest.mark.parametrize("patched", [False, True], ids=["LazyCell", "patched"])
def test_dead_layers_cost_a_settled_graph_nothing(patched: bool, trains: bool) -> None:
    """Forty dead layers add no call of any function, MindSpore's own ones included: it tells each cell what runs."""
    ms.set_context(mode=ms.GRAPH_MODE)
    with lazycell.patch() if patched else nullcontext():
        base = nn.Cell if patched else lazycell.LazyCell
        none, many = (all_calls(settled_graph(base, dead, trains)) for dead in (0, 40))
        assert none == many > 0


@pytest.mark.filterwarnings("ignore::lazycell.UnusedLayerWarning")
def test_a_graph_compiled_anew_tells_all_cells() -> None:
    """What MindSpore keeps on a cell names the graph that it is in."""
    ms.set_context(mode=ms.GRAPH_MODE)
    net = Net(2)
    for rows in (1, 2):
        net(ones(rows, 2))
        assert {cell.compile_phase for _, cell in net.cells_and_names()} == {net.compile_phase}


@pytest.mark.filterwarnings("ignore::lazycell.UnusedLayerWarning")
@pytest.mark.parametrize("which", ["construction", "first forward", "listing", "registry", "callbacks"])
def test_work_per_layer_does_not_grow(which: str) -> None:
    """Ten times the layers take ten times the work."""
    counts = []
    for layers in (20, 200):
        made: list[Net] = []
        calls = {"construction": lazycell_calls(lambda layers=layers, made=made: made.append(Net(layers)))}
        net = made[0]
        calls["first forward"] = lazycell_calls(lambda net=net: net(ones(1, 2)))
        calls["listing"] = lazycell_calls(lambda net=net: net.trainable_params())
        calls["registry"] = lazycell_calls(lambda net=net: str(lazycell.registry(net)))
        lazycell.registry(net).reset()
        lazycell.registry(net).on_touch(lambda record: None)
        calls["callbacks"] = lazycell_calls(lambda net=net: net(ones(1, 2)))
        counts.append(calls[which] / layers)
    assert counts[1] < 1.2 * counts[0]


def settled_step(dead: int) -> Callable[[], object]:
    """A training step that has run, of a net with dead layers."""
    net = branches(lazycell.LazyCell, dead)
    optimizer = lazycell.LazyOptimizer(nn.Momentum, net.trainable_params(), 0.1, 0.9)

    def forward(x: Tensor) -> Tensor:
        return net(x).sum()

    grad = lazycell.value_and_grad(forward, None, net.trainable_params())

    def step() -> None:
        _, gradients = grad(ones(1, 2))
        optimizer(gradients)

    for _ in range(3):
        step()
    return step


@pytest.mark.filterwarnings("ignore::lazycell.UnusedLayerWarning")
@pytest.mark.parametrize("mode", [ms.PYNATIVE_MODE, ms.GRAPH_MODE], ids=["PyNative", "Graph"])
@pytest.mark.parametrize("looked", [False, True], ids=["", "after a script has looked at a list under the patch"])
def test_dead_layers_cost_a_settled_step_nothing(looked: bool, mode: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step with forty dead layers runs exactly the functions of lazycell that it runs without any."""
    ms.set_context(mode=mode)
    monkeypatch.setattr(_listed.Listed, "ever", looked)
    steps = [settled_step(dead) for dead in (0, 40)]
    for _ in range(3):  # in turns, so that what other tests have left is the same for both
        none, many = (lazycell_calls(step, with_guard=False) for step in steps)
    assert none == many


@pytest.mark.filterwarnings("ignore::lazycell.UnusedLayerWarning")
def test_a_settled_step_makes_no_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who took part is found out with what is there: a new parameter costs as much as several operators."""
    step, made = settled_step(1), []
    native = ms.Parameter.__init__
    monkeypatch.setattr(ms.Parameter, "__init__", lambda *args, **kwargs: made.append(args) or native(*args, **kwargs))
    step()
    assert not made


def test_the_guard_of_older_versions_is_needed_only_there() -> None:
    """From MindSpore 2.9 on nothing of MindSpore stays replaced."""
    Net(1)
    executor = _mindspore._versions.api._pynative_executor
    assert ("run_op_async" in vars(executor)) == (not _mindspore.OPERATORS_ASK)
