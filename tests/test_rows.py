"""What a report says: sums, and for each layer without a gradient the reason."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from helpers import ones
from hypothesis import given
from hypothesis import strategies as st
from mindspore import Parameter, Tensor, nn, ops
from strategies import Block, build, inputs, plans

import lazycell
from lazycell import _gradient, _history, _unsized
from lazycell._rows import LayerRow, Reason, net_report
from lazycell._run import Nets

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
        assert found["cut"].detail == "called, but cut off from the loss: no gradient arrived at it (5 computations)"
        assert found["spare"].optional and not found["dead"].optional
        assert found["spare"].detail == "never called, and declared optional"

    def test_frozen_by_its_author(self) -> None:
        """It doesn't claim that lazycell froze it."""
        net = Net()
        for parameter in net.stem.get_parameters():
            parameter.requires_grad = False
        net(ones(1, 4), False)
        assert rows(net)["stem"].detail == "requires no gradient"

    def test_frozen_by_lazycell(self) -> None:
        """It says so also of a layer whose first parameters never required a gradient."""
        net = lazycell.track(nn.SequentialCell(nn.BatchNorm1d(4)))
        lazycell.freeze(net[0])
        net(ones(2, 4))
        assert rows(net)["0"].detail == "requires no gradient, as lazycell.freeze() made it"

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
        """They are lazycell's there, and looked at if somebody wants to know, as ``run`` does."""
        with lazycell.patch(), Nets().watched():
            net = Net()
            optimizer = nn.Momentum(net.trainable_params(), 0.1, 0.9)
            grad_fn = ms.value_and_grad(lambda x: net(x, True).sum(), None, optimizer.parameters)
            for _ in range(3):
                optimizer(grad_fn(ones(1, 4))[1])
        assert reasons(net)["cut"] == "cut_off" and net_report(net).summary.num_steps == 3

    def test_the_first_step_is_always_seen(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Without an optimizer that wants to know, later ones aren't, and nothing is claimed of them."""
        monkeypatch.setattr(_gradient, "participants", ())  # optimizers of other tests may still be alive
        net = Net()
        train(net, net.trainable_params(), [True, False, False])
        assert net_report(net).summary.num_steps == 3
        assert not {"cut", "branch"} & set(reasons(net)) and rows(net)["branch"].detail == ""
        detail = "no gradient arrived at it in 1 of 3 computations; the others weren't looked at"
        assert rows(net)["cut"].detail == detail

    def test_a_native_optimizer(self) -> None:
        """What it updates is known while it is alive."""
        net = Net()
        net(ones(1, 4), False)
        optimizer = nn.Momentum(net.head.trainable_params() + net.stem.trainable_params(), 0.1, 0.9)
        told = lazycell.report(net)
        assert len(optimizer.parameters) == 4
        missing = [line for line in told.splitlines() if "  not in the optimizer" in line]
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


class TestSteps:
    """They are counted per parameter, among the computations that asked for its gradient."""

    @pytest.fixture(autouse=True)
    def watched(self) -> Iterator[None]:
        """Every computation is looked at."""
        with Nets().watched():
            yield

    def test_two_players(self) -> None:
        """A critic that is trained five times as often as the generator: nothing is wrong with either."""

        class Game(lazycell.LazyCell):
            def __init__(self) -> None:
                super().__init__()
                self.generator, self.critic = nn.Dense(4, 4), nn.Dense(4, 1)

            def construct(self, x: Tensor) -> Tensor:
                return self.critic(self.generator(x)).sum()

        game = Game()
        critic = lazycell.value_and_grad(game, None, lazycell.trainable_params(game.critic))
        generator = lazycell.value_and_grad(game, None, lazycell.trainable_params(game.generator))
        for _ in range(6):
            for _ in range(5):
                critic(ones(1, 4))
            generator(ones(1, 4))
        assert reasons(game) == {} and net_report(game).summary.num_steps == 30

    def test_stages(self) -> None:
        """Layers that are trained one after the other."""
        net = Net()
        for layer in (net.head, net.stem):
            train(net, lazycell.trainable_params(layer), [True, True, False])
        assert not {"head", "stem"} & set(reasons(net))

    @pytest.mark.parametrize("flags", [[False, False, True, False, True], [False, False, True], [True, False]])
    def test_what_joins_later(self, flags: list[bool]) -> None:
        """A branch that is first taken in a later step missed those before; which is also what an eager list says."""
        net = Net()
        train(net, net.trainable_params(), flags)
        taken = [number for number, flag in enumerate(flags, 1) if flag]
        when = f"first in step {taken[0]}, last in step {taken[-1]}" if len(taken) > 1 else f"step {taken[0]}"
        assert rows(net)["branch"].detail == f"reached in {len(taken)} of {len(flags)} steps: {when}"

    def test_what_is_unfrozen_later(self) -> None:
        """While it was frozen, nobody asked for its gradient."""
        net = Net()
        grad_fn = lazycell.value_and_grad(lambda x: net(x, False).sum(), None, net.trainable_params())
        lazycell.freeze(net.stem)
        grad_fn(ones(1, 4)), grad_fn(ones(1, 4))
        assert reasons(net)["stem"] == "frozen"
        lazycell.unfreeze(net.stem)
        grad_fn(ones(1, 4))
        assert "stem" not in reasons(net) and net_report(net).summary.num_steps == 3

    def test_partly_frozen(self) -> None:
        """What a parameter that is frozen now has had counts for its layer."""
        net = Net()
        grad_fn = lazycell.value_and_grad(lambda x: net(x, False).sum(), None, [net.stem.weight])
        grad_fn(ones(1, 4))
        net.stem.weight.requires_grad = False

        def without(x: Tensor) -> Tensor:
            return ops.stop_gradient(net.stem(x)).sum() + net.head(x).sum()

        lazycell.value_and_grad(without, None, [net.stem.bias, net.head.weight])(ones(1, 4))
        assert "stem" not in reasons(net)

    @given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 3), st.booleans()), max_size=20))
    def test_counts(self, computations: list[tuple[int, int, bool]]) -> None:
        """Whatever two functions ask for in turns, watched or not, each parameter knows its own computations."""
        parameters = [Parameter(Tensor(np.ones(1, np.float32)), name=str(number)) for number in range(2)]
        functions = _history.History(), _history.History()
        seen: dict[int, list[bool | None]] = {0: [], 1: []}
        for which, asked, is_watched in computations:
            chosen = [number for number in (0, 1) if asked >> number & 1]
            active = tuple((number + len(seen[number])) % 2 == 0 for number in chosen)
            functions[which].note(tuple(parameters[number] for number in chosen), active if is_watched else None)
            for number, reached in zip(chosen, active):
                seen[number].append(reached if is_watched else None)
        for number, parameter in enumerate(parameters):
            reached = [step for step, is_reached in enumerate(seen[number], 1) if is_reached]
            first, last = (reached[0], reached[-1]) if reached else (0, 0)
            steps = _history.steps_of(parameter)
            assert (steps.asked, steps.unwatched, steps.reached) == (
                len(seen[number]), seen[number].count(None), len(reached)
            )  # fmt: skip
            assert (steps.first, steps.last) == (first, last)


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
        assert rows(net)["inner.left"].detail == "never called; it is MindSpore's own"

    def test_a_net_that_nobody_calls(self) -> None:
        """Nobody knows what of it would be used."""
        net = Net()
        assert not net_report(net).has_unused
        assert rows(net)[""].detail == "built, but never run"
        assert {rows(net)[name].detail for name in ("stem", "dead", "dead.0")} == {
            "within the net, which was never run"
        }
        net(ones(1, 4), True)
        assert net_report(net).has_unused and rows(net)["dead.0"].detail == "within dead, which was never called"


@given(plans())
def test_sums(plan: Block) -> None:
    """Totals of the net are the sums of all layers, whatever is shared; the order of rows is that of the tree."""
    net = build(plan, lazycell.LazyCell, root=True)
    net(inputs())
    report = net_report(net)
    everything = list(net.get_parameters())
    root, *layers = report.layers
    assert root.depth == 0 and root.name == "" and root.total_nbytes == report.summary.nbytes
    assert report.summary.nbytes == sum(map(_unsized.num_bytes, everything)) == sum(row.nbytes for row in report.layers)
    assert report.summary.num_parameters == sum(map(_unsized.num_elements, everything))
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


def test_kinds() -> None:
    """Nets that differ in the numbers of their steps only are of one kind; in what is unused, of two."""
    reports = []
    for flags in ([True], [False, True], [False, False, True], [False]):
        net = Net()
        optimizer = lazycell.LazyOptimizer(nn.Momentum, net, 0.1, 0.9)
        train(net, optimizer.parameters, flags)
        reports.append(net_report(net))
    assert len(set(reports)) == 4
    first, *others, last = [report.kind for report in reports]
    assert others[0] == others[1] and len({first, last, *others}) == 3


def test_places_are_relative() -> None:
    """To a folder that they are in."""
    net = Net()
    net(ones(1, 4), True)
    report = net_report(net)
    full = [row.where for row in report.layers]
    assert [row.where for row in report.seen_from(os.path.join(os.sep, "elsewhere")).layers] == full
    here = os.path.dirname(os.path.abspath(__file__))
    assert [row.where for row in report.seen_from(here).layers if row.where][0].startswith("test_rows.py:")
    assert [row.where for row in report.seen_from(here[:-1]).layers] == full


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
