"""What a report says: sums, and for each layer without a gradient the reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from helpers import ones
from hypothesis import given
from mindspore import Parameter, Tensor, nn, ops
from strategies import Block, build, inputs, plans

import lazycell
from lazycell._rows import LayerRow, Reason, net_report

MODES = {"PyNative": ms.PYNATIVE_MODE, "Graph": ms.GRAPH_MODE}
pytestmark = pytest.mark.filterwarnings("ignore::lazycell.UnusedLayerWarning")


class Net(lazycell.LazyCell):
    """A layer for each reason."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Dense(4, 4)
        self.branch = nn.Dense(4, 4)
        self.cut = nn.Dense(4, 2)
        self.dead = nn.SequentialCell(nn.Dense(4, 4), nn.ReLU())
        self.spare = lazycell.optional(nn.Dense(4, 4))
        self.alone = nn.Dense(4, 2)
        self.head = nn.Dense(4, 2)

    def construct(self, x: Tensor, flag: bool) -> Tensor:
        x = self.stem(x)
        if flag:
            x = x + self.branch(x)
        return self.head(x) + self.alone(x) + ops.stop_gradient(self.cut(x))


def rows(net: nn.Cell) -> dict[str, LayerRow]:
    """The rows of a net's report, by name."""
    return {row.name: row for row in net_report(net).layers}


def reasons(net: nn.Cell) -> dict[str, str]:
    """What is said against layers."""
    return {name: row.reason.value for name, row in rows(net).items() if row.reason}


def train(net: nn.Cell, weights: Any, flags: list[bool], optimizer: Any = None) -> None:
    """Steps with or without the branch."""

    def loss(x: Tensor, flag: bool) -> Tensor:
        return net(x, flag).sum()

    grad_fn = lazycell.value_and_grad(loss, None, weights)
    for flag in flags:
        _, grads = grad_fn(ones(3, 4), flag)
        if optimizer is not None:
            optimizer(grads)


class TestReasons:
    """Why a layer has no gradient."""

    def test_each(self) -> None:
        """All of them in one net; what has a gradient at each step has none."""
        net = Net()
        lazycell.freeze(net.stem)
        updated = [p for p in net.get_parameters() if "alone" not in p.name]
        optimizer = lazycell.LazyOptimizer(nn.Adam, updated)
        train(net, optimizer.parameters, [False, True, False, True, False], optimizer)
        assert reasons(net) == {
            "stem": "frozen",
            "branch": "some_steps",
            "cut": "cut_off",
            "dead": "never_called",
            "dead.0": "never_called",
            "dead.1": "never_called",
            "spare": "never_called",
            "alone": "not_in_optimizer",
        }
        found = rows(net)
        assert found["branch"].detail == "reached in 2 of 5 steps: first in step 2, last in step 4"
        assert found["stem"].detail == "requires no gradient, as lazycell.freeze() made it"
        assert found["spare"].optional and not found["dead"].optional

    def test_frozen_by_its_author(self) -> None:
        """It doesn't claim that lazycell froze it."""
        net = Net()
        for parameter in net.stem.get_parameters():
            parameter.requires_grad = False
        net(ones(1, 4), False)
        assert rows(net)["stem"].detail == "requires no gradient"

    def test_without_gradients(self) -> None:
        """After a forward pass alone, nothing is said of gradients."""
        net = Net()
        net(ones(1, 4), True)
        assert set(reasons(net).values()) == {"never_called"} and net_report(net).summary.num_steps == 0

    def test_mindspores_own_gradients(self) -> None:
        """They aren't seen, and nothing is claimed."""
        net = Net()
        net(ones(1, 4), True)
        ms.value_and_grad(lambda x: net(x, True).sum(), None, net.trainable_params())(ones(1, 4))
        assert set(reasons(net).values()) == {"never_called"} and net_report(net).summary.num_steps == 0

    def test_under_the_patch(self) -> None:
        """They are lazycell's there."""
        with lazycell.patch():
            net = Net()
            optimizer = nn.Momentum(net.trainable_params(), 0.1, 0.9)
            grad_fn = ms.value_and_grad(lambda x: net(x, True).sum(), None, optimizer.parameters)
            for _ in range(3):
                optimizer(grad_fn(ones(1, 4))[1])
        assert reasons(net)["cut"] == "cut_off" and net_report(net).summary.num_steps == 3

    def test_the_first_step_is_always_seen(self) -> None:
        """Without an optimizer that wants to know, later ones aren't, and nothing is claimed of them."""
        net = Net()
        train(net, net.trainable_params(), [True, False, False])
        assert net_report(net).summary.num_steps == 1
        assert reasons(net)["cut"] == "cut_off" and "branch" not in reasons(net)

    def test_a_native_optimizer(self) -> None:
        """What it updates is known while it is alive."""
        net = Net()
        net(ones(1, 4), False)
        optimizer = nn.Momentum(net.head.trainable_params() + net.stem.trainable_params(), 0.1, 0.9)
        told = lazycell.report(net)
        assert len(optimizer.parameters) == 4
        missing = [line for line in told.splitlines() if "not in the optimizer" in line]
        assert len(missing) == 2 and "(cut)" in missing[0] and "(alone)" in missing[1]

    def test_in_graph_mode(self) -> None:
        """What the graph holds counts as reached."""
        net = Net()
        ms.set_context(mode=ms.GRAPH_MODE)
        optimizer = lazycell.LazyOptimizer(nn.Momentum, net, 0.1, 0.9)
        train(net, optimizer.parameters, [False, True, False], optimizer)
        assert reasons(net)["branch"] == "some_steps"
        assert rows(net)["branch"].detail == "reached in 1 of 3 steps: step 2"

    def test_functions_that_take_turns(self) -> None:
        """Steps are counted in the order in which they came, whichever function computed them."""
        net = Net()
        optimizer = lazycell.LazyOptimizer(nn.Momentum, net, 0.1, 0.9)

        def with_branch(x: Tensor) -> Tensor:
            return net(x, True).sum()

        def without(x: Tensor) -> Tensor:
            return net(x, False).sum()

        one, other = (lazycell.value_and_grad(fn, None, optimizer.parameters) for fn in (with_branch, without))
        for function in (other, other, one, other, one, other):
            function(ones(1, 4))
        assert rows(net)["branch"].detail == "reached in 2 of 6 steps: first in step 3, last in step 5"

    def test_reset_forgets(self) -> None:
        """Touches, and steps with them."""
        net = Net()
        optimizer = lazycell.LazyOptimizer(nn.Momentum, net, 0.1, 0.9)
        train(net, optimizer.parameters, [False, False])
        lazycell.registry(net).reset()
        assert net_report(net).summary.num_steps == 0
        train(net, optimizer.parameters, [True])
        assert net_report(net).summary.num_steps == 1 and "branch" not in reasons(net)


class TestNobodysFault:
    """What MindSpore keeps unused inside its own cells is no reason to fail."""

    def test_inside_a_layer(self) -> None:
        """It may be unused."""

        class Inner(nn.Cell):
            __module__ = "mindspore.nn.layer.invented"

            def __init__(self) -> None:
                super().__init__()
                self.used, self.left = nn.Dense(2, 2), nn.Dense(2, 2)

            def construct(self, x: Tensor) -> Tensor:
                return self.used(x)

        class Outer(lazycell.LazyCell):
            def __init__(self) -> None:
                super().__init__()
                self.inner = Inner()

            def construct(self, x: Tensor) -> Tensor:
                return self.inner(x)

        net = Outer()
        net(ones(1, 2))
        assert rows(net)["inner.left"].optional and not net_report(net).has_unused

    def test_a_net_that_nobody_calls(self) -> None:
        """That is its author's matter."""
        assert net_report(Net()).has_unused
        assert rows(Net())["dead.0"].detail == "within dead, which was never called"


@given(plans())
def test_sums(plan: Block) -> None:
    """Totals of the net are the sums of all layers, whatever is shared; the order of rows is that of the tree."""
    net = build(plan, lazycell.LazyCell, root=True)
    net(inputs())
    report = net_report(net)
    everything = list(net.get_parameters())
    root, *layers = report.layers
    assert root.depth == 0 and root.name == "" and root.total_nbytes == report.summary.nbytes
    assert report.summary.nbytes == sum(p.nbytes for p in everything) == sum(row.nbytes for row in report.layers)
    assert report.summary.num_parameters == sum(p.size for p in everything)
    registry = lazycell.registry(net)
    assert report.summary.allocated_nbytes == registry.allocated_nbytes
    assert root.deferred_nbytes == report.summary.deferred_nbytes == registry.deferred_nbytes
    assert [(row.name, row.state, row.order, row.where) for row in layers] == [
        (layer.name, layer.state.value, layer.order, layer.where) for layer in registry.layers
    ]
    for above, row in zip(report.layers, layers):
        assert 1 <= row.depth <= above.depth + 1
    names = [row.name for row in report.layers if row.reason is Reason.NEVER_CALLED]
    assert names == list(registry.untouched)


def test_a_deep_net() -> None:
    """No depth is too deep."""
    net: nn.Cell = nn.Dense(2, 2)
    for _ in range(300):
        net = nn.SequentialCell(net)
    report = net_report(lazycell.track(net))
    assert report.layers[-1].depth == 300 and report.layers[-1].key == "0"


def test_costs_nothing_per_step_that_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps in which the same parameters take part are only counted; nothing is written at the parameters."""
    from lazycell import _history

    net = Net()
    optimizer = lazycell.LazyOptimizer(nn.Momentum, net, 0.1, 0.9)
    settled: list[Callable[..., None]] = []
    native = _history.History.settle
    monkeypatch.setattr(_history.History, "settle", lambda self: (self._pending and settled.append(self), native(self)))
    train(net, optimizer.parameters, [False] * 10)
    assert not settled
    assert net_report(net).summary.num_steps == 10 and len(settled) == 1


def test_parameters_are_not_kept_alive() -> None:
    """The history of steps holds none."""
    import gc
    import weakref

    net = Net()
    optimizer = lazycell.LazyOptimizer(nn.Momentum, net, 0.1, 0.9)
    train(net, optimizer.parameters, [False])
    known = weakref.ref(net)
    del net, optimizer
    gc.collect()
    assert known() is None


def test_a_bare_parameter() -> None:
    """One that a used cell doesn't read has no row of its own."""

    class Bare(lazycell.LazyCell):
        def __init__(self) -> None:
            super().__init__()
            self.read = Parameter(Tensor(np.ones(2, np.float32)), name="read")
            self.left = Parameter(Tensor(np.ones(2, np.float32)), name="left")

        def construct(self, x: Tensor) -> Tensor:
            return x * self.read

    net = Bare()
    net(ones(1, 2))
    report = net_report(net)
    assert len(report.layers) == 1 and report.summary.touched_parameters == 2 and not report.has_unused
