"""An optimizer that is built first, grows, and updates what took part: equal to a hand-pruned net's, bit for bit."""

from __future__ import annotations

import copy
import gc
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from helpers import bits, is_deferred, names, ones, resident_bytes, seed
from mindspore import Parameter, Tensor, mint, nn, ops
from mindspore.experimental import optim as experimental

import lazycell
from lazycell import _aligned
from lazycell._mindspore import _recording

pytestmark = pytest.mark.filterwarnings("ignore::lazycell.UnusedLayerWarning")

MODES = {"PyNative": ms.PYNATIVE_MODE, "Graph": ms.GRAPH_MODE}


def make(base: type[nn.Cell], pruned: bool = False) -> nn.Cell:
    """Trunk, a branch that a flag takes, head; and a dead layer, which the hand-pruned net lacks."""

    class Net(base):
        def __init__(self) -> None:
            super().__init__()
            self.trunk, self.branch, self.head = nn.Dense(3, 3), nn.Dense(3, 3), nn.Dense(3, 2)
            if not pruned:
                self.dead = nn.Dense(3, 3)

        def construct(self, x, flag=False):
            h = ops.relu(self.trunk(x))
            if flag:
                h = self.branch(h)
            return self.head(h)

    return Net()


def pair(value: int = 0) -> tuple[nn.Cell, nn.Cell]:
    """The hand-pruned net, and the lazy one, from one seed."""
    seed(value)
    pruned = make(nn.Cell, pruned=True)
    seed(value)
    return pruned, make(lazycell.LazyCell)


def batch(step: int) -> Tensor:
    """Another input for each step."""
    return Tensor(np.random.RandomState(step).randn(4, 3).astype(np.float32))


def loss_of(net: nn.Cell) -> Callable[..., Tensor]:
    """A loss whose source the compiler can read."""

    def loss(x, flag=False):
        return ((net(x, flag) - 1) ** 2).mean()

    return loss


def assert_same(pruned: nn.Cell, net: nn.Cell) -> None:
    """Every parameter of the pruned net has the same bits in the other."""
    by_name = net.parameters_dict()
    for parameter in pruned.get_parameters():
        assert bits(parameter) == bits(by_name[parameter.name]), parameter.name


SCHEDULE = nn.ExponentialDecayLR(0.1, 0.9, 4)
OPTIMIZERS: dict[str, tuple[type, dict[str, Any]]] = {
    "Momentum": (nn.Momentum, dict(learning_rate=0.1, momentum=0.9, weight_decay=0.01)),
    "Momentum, a schedule": (nn.Momentum, dict(learning_rate=SCHEDULE, momentum=0.9)),
    "SGD": (nn.SGD, dict(learning_rate=0.1, momentum=0.9, weight_decay=0.01)),
    "Adam": (nn.Adam, dict(learning_rate=0.1, weight_decay=0.01)),
    "Adam, a list": (nn.Adam, dict(learning_rate=[0.1 / (step + 1) for step in range(200)])),
    "AdamWeightDecay": (nn.AdamWeightDecay, dict(learning_rate=0.01, weight_decay=0.1)),
    "AdaMax": (nn.AdaMax, dict(learning_rate=0.01)),
    "Adagrad": (nn.Adagrad, dict(learning_rate=0.01)),
    "RMSProp": (nn.RMSProp, dict(learning_rate=0.01, momentum=0.5)),
    "Rprop": (nn.Rprop, dict(learning_rate=0.01)),
    "ASGD": (nn.ASGD, dict(learning_rate=0.01)),
    "Lamb": (nn.Lamb, dict(learning_rate=0.01)),
    "FTRL": (nn.FTRL, dict(learning_rate=0.01)),
    "experimental.SGD": (experimental.SGD, dict(lr=0.1, momentum=0.9)),
    "experimental.Adam": (experimental.Adam, dict(lr=0.01, amsgrad=True)),
    "experimental.AdamW": (experimental.AdamW, dict(lr=0.01)),
    "mint.AdamW": (mint.optim.AdamW, dict(lr=0.01)),
}
WHOLE = ("Momentum", "AdamWeightDecay", "SGD", "mint.AdamW")


def native_or_skip(factory: type, options: dict[str, Any]) -> None:
    """Skip optimizers that have no kernel on this device: the plain one fails, too."""
    net = nn.Dense(2, 2)
    try:
        optimizer = factory(net.trainable_params(), **options)
        optimizer(ms.grad(lambda x: net(x).sum(), None, net.trainable_params())(ones(1, 2)))
        net.weight.asnumpy()
    except (RuntimeError, TypeError, ValueError) as error:
        pytest.skip(f"plain MindSpore can't run it here: {str(error).splitlines()[0]}")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_usual_loop(name: str, mode: str) -> None:
    """Built before anything ran, trained: every bit is the hand-pruned net's under the native optimizer."""
    factory, options = OPTIMIZERS[name]
    native_or_skip(factory, options)
    steps = 100 if name in WHOLE and mode == "PyNative" else 12
    pruned, net = pair()
    optimizer = lazycell.LazyOptimizer(factory, net.trainable_params(), **options)
    assert isinstance(optimizer, factory) and type(optimizer).__name__ == "LazyOptimizer"
    weights = [p for p in pruned.trainable_params() if "branch" not in p.name]
    native = factory(weights, **options)
    ms.set_context(mode=MODES[mode])
    expected = ms.value_and_grad(loss_of(pruned), None, weights)
    function = lazycell.value_and_grad(loss_of(net), None, optimizer.parameters)
    for step in range(steps):
        value, gradients = expected(batch(step))
        native(gradients)
        lazy_value, lazy_gradients = function(batch(step))
        optimizer(lazy_gradients)
        assert bits(value) == bits(lazy_value)
    assert is_deferred(net.dead.weight) and is_deferred(net.branch.weight)
    assert names(optimizer.parameters) == names(weights)
    assert_same(pruned, net)


def test_mindspores_own_gradient_functions() -> None:
    """They take the optimizer's live list as any other; what took part isn't known then, so all does."""
    pruned, net = pair()
    optimizer = lazycell.LazyOptimizer(nn.Momentum, net, 0.1, 0.9)
    function = ms.value_and_grad(loss_of(net), None, optimizer.parameters)
    by_hand = nn.Momentum([p for p in pruned.trainable_params() if "branch" not in p.name], 0.1, 0.9)
    expected = ms.value_and_grad(loss_of(pruned), None, by_hand.parameters)
    for step in range(10):
        optimizer(function(batch(step))[1])
        by_hand(expected(batch(step))[1])
    assert is_deferred(net.branch.weight)
    assert_same(pruned, net)
    optimizer(function(batch(10), True)[1])
    before = bits(net.branch.weight)
    optimizer(function(batch(11))[1])
    assert bits(net.branch.weight) != before


@pytest.mark.parametrize(
    ("name", "mode", "how"),
    [(name, "PyNative", how) for name in ("Momentum", "AdamWeightDecay", "experimental.AdamW", "Adam", "SGD")
     for how in ("gradients", "clipped to a tuple", "accumulated")] + [("Momentum", "Graph", "gradients")],
)  # fmt: skip
def test_a_branch_that_joins_and_rests(name: str, mode: str, how: str) -> None:
    """First taken at step 5: it joins, and all else is carried over. Skipped from step 20 on: it stays as it is."""
    factory, options = OPTIMIZERS[name]
    pruned, net = pair()
    optimizer = lazycell.LazyOptimizer(factory, net, **options)
    function = lazycell.value_and_grad(loss_of(net), None, optimizer.parameters)
    by_hand = ByHand(factory, options, pruned)
    ms.set_context(mode=MODES[mode])
    resting: dict[str, Any] = {}
    for step in range(30):
        flag = 5 <= step < 20
        _, gradients = function(batch(step), flag)
        if how == "clipped to a tuple":
            gradients = ops.clip_by_global_norm(gradients, 1e9)
        elif how == "accumulated":
            gradients = gradients.replace(g * 0.5 for g in gradients)
            gradients = gradients.add(gradients)
        optimizer(gradients)
        by_hand.step(batch(step), flag)
        assert len(optimizer.parameters) == (4 if step < 5 else 6)
        if step == 19:
            resting = {n: bits(p) for n, p in optimizer.state_dict().items() if "branch" in n}
            resting["v"] = bits(net.branch.weight)
    for key, kept in resting.items():
        now = net.branch.weight if key == "v" else optimizer.state_dict()[key]
        assert bits(now) == kept, key
    assert len(resting) > 2
    if how == "clipped to a tuple" or mode == "Graph":  # clipping multiplies, and graphs are fused
        close(pruned, net)
        return
    assert_same(pruned, net)
    states = optimizer.state_dict()
    for key, state in by_hand.state().items():
        assert bits(state) == bits(states[key]), key


class ByHand:
    """Native optimizers over what takes part, whose state is carried over by hand, value by value."""

    def __init__(self, factory: type, options: dict[str, Any], net: nn.Cell) -> None:
        self.factory, self.options, self.net = factory, options, net
        self.known: dict[str, Tensor] = {}

    def own(self, native: nn.Cell, weights: list[Parameter]) -> list[Parameter]:
        """The state of a native optimizer."""
        trained = set(map(id, weights))
        states = {id(p): p for p in native.get_parameters() if id(p) not in trained}
        for group in getattr(native, "param_groups", ()):
            states.update((id(p), p) for v in group.values() if isinstance(v, ms.ParameterTuple) for p in v)
        return list(states.values())

    def step(self, x: Tensor, flag: bool) -> None:
        """One step of the parameters that take part."""
        weights = [p for p in self.net.trainable_params() if flag or "branch" not in p.name]
        self.update(weights, ms.grad(loss_of(self.net), None, weights)(x, flag))

    def update(self, weights: list[Parameter], gradients: tuple[Tensor, ...]) -> None:
        """One step with a new native optimizer, its state set to what it was."""
        native = self.factory(weights, **self.options)
        for state in self.own(native, weights):
            if state.name in self.known:
                state.set_data(self.known[state.name])
        native(gradients)
        self.known.update((state.name, Tensor(state.asnumpy())) for state in self.own(native, weights))

    def state(self) -> dict[str, Tensor]:
        """All state by name."""
        return self.known


def test_without_activity() -> None:
    """MindSpore's behaviour, if that is asked for: decay and momentum move what took no part."""
    pruned, net = pair()
    lazycell.dry_run(net, lazycell.spec(4, 3), True)
    optimizer = lazycell.LazyOptimizer(nn.AdamWeightDecay, net, learning_rate=0.1, weight_decay=0.1, activity=False)
    native = nn.AdamWeightDecay(pruned.trainable_params(), learning_rate=0.1, weight_decay=0.1)
    function = lazycell.value_and_grad(loss_of(net), None, optimizer.parameters)
    expected = ms.value_and_grad(loss_of(pruned), None, pruned.trainable_params())
    for step in range(6):
        optimizer(function(batch(step), step < 2)[1])
        native(expected(batch(step), step < 2)[1])
    assert_same(pruned, net)


def test_clipping_sees_what_took_part() -> None:
    """A norm over gradients of zeros is the norm without them, and what took no part isn't moved."""
    _, net = pair()
    optimizer = lazycell.LazyOptimizer(nn.SGD, net, 0.1, weight_decay=0.1)
    function = lazycell.value_and_grad(loss_of(net), None, optimizer.parameters)
    optimizer(function(batch(0), True)[1])
    before = bits(net.branch.weight)
    _, gradients = function(batch(1), False)
    optimizer(ops.clip_by_global_norm(gradients, 0.01))
    assert bits(net.branch.weight) == before
    optimizer(function(batch(2), True)[1])
    assert bits(net.branch.weight) != before


def test_accumulation_over_steps_with_different_branches() -> None:
    """The sum of two steps is one step; a branch that one of them took takes part."""
    pruned, net = pair()
    optimizer = lazycell.LazyOptimizer(nn.Momentum, net, 0.1, 0.9)
    function = lazycell.value_and_grad(loss_of(net), None, optimizer.parameters)
    weights = list(pruned.trainable_params())
    native = nn.Momentum(weights, 0.1, 0.9)
    expected = ms.value_and_grad(loss_of(pruned), None, weights)
    for step in range(3):
        total = None
        for part, flag in enumerate((False, True)):
            _, gradients = function(batch(2 * step + part), flag)
            total = gradients if total is None else total.add(gradients)
        optimizer(total)
        one, two = (expected(batch(2 * step + part), flag)[1] for part, flag in enumerate((False, True)))
        native(tuple(a + b for a, b in zip(one, two)))
        assert_same(pruned, net)


class TestGroups:
    """Parameter groups whose members are live lists, cells, predicates over them, or pairs."""

    def trained(
        self, params: Callable[[nn.Cell], Any], plain: Callable[[nn.Cell], Any], factory: type = nn.Adam
    ) -> Any:
        """A lazy and a hand-pruned net after five steps, and the lazy net's optimizer."""
        pruned, net = pair()
        options = {"lr": 0.1} if factory is experimental.Adam else {"learning_rate": 0.1}
        optimizer = lazycell.LazyOptimizer(factory, params(net), **options)
        function = lazycell.value_and_grad(loss_of(net), None, optimizer.parameters)
        function(batch(0))
        native = factory(plain(pruned), **options)
        expected = ms.value_and_grad(loss_of(pruned), None, native.parameters)
        for step in range(5):
            optimizer(function(batch(step))[1])
            native(expected(batch(step))[1])
        assert_same(pruned, net)
        assert names(optimizer.parameters) == names(native.parameters)
        return optimizer

    def test_predicates(self) -> None:
        """Weight decay without biases, as everyone writes it; lists get what predicates leave."""

        def flat(p: Parameter) -> bool:
            return p.ndim < 2

        def plain(net: nn.Cell) -> list[dict]:
            chosen = [p for p in net.trainable_params() if "branch" not in p.name]
            return [
                {"params": [p for p in chosen if flat(p)], "weight_decay": 0.0},
                {"params": [p for p in chosen if not flat(p)], "weight_decay": 0.1},
            ]

        for params in (
            lambda net: [{"params": flat, "weight_decay": 0.0}, {"params": net, "weight_decay": 0.1}],
            lambda net: [
                {"params": (net.trainable_params(), flat), "weight_decay": 0.0},
                {"params": (net.trainable_params(), lambda p: not flat(p)), "weight_decay": 0.1},
            ],
        ):
            self.trained(params, plain)

    @pytest.mark.parametrize("factory", [nn.Adam, experimental.Adam])
    def test_groups_that_are_empty_at_first(self, factory: type) -> None:
        """A group without members waits; learning rates stay with their groups when it gets some."""
        _, net = pair()
        rates = {"lr" if factory is experimental.Adam else "learning_rate": 0.5}
        optimizer = lazycell.LazyOptimizer(
            factory,
            [{"params": net.branch, "lr": 0.001}, {"params": net.trunk, "lr": 0.01}, {"params": net.head, "lr": 0.1}],
            **rates,
        )
        function = lazycell.value_and_grad(loss_of(net), None, optimizer.parameters)
        optimizer(function(batch(0))[1])
        assert names(optimizer.parameters) == ["trunk.weight", "trunk.bias", "head.weight", "head.bias"]
        optimizer(function(batch(1), True)[1])
        assert names(optimizer.parameters)[:2] == ["branch.weight", "branch.bias"]
        state = optimizer.state_dict()
        found = {n: float(p.asnumpy()) for n, p in state.items() if "learning_rate_group" in n}
        if found:
            assert found == pytest.approx({f"learning_rate_group_{i}": r for i, r in enumerate((0.001, 0.01, 0.1))})

    def test_order_params(self) -> None:
        """The order that is asked for is that of the gradients."""

        def groups(net: nn.Cell) -> list[dict]:
            chosen = [p for p in net.trainable_params() if "branch" not in p.name]
            return [{"params": chosen[2:]}, {"params": chosen[:2], "lr": 0.01}, {"order_params": chosen}]

        self.trained(
            lambda net: [
                {"params": net.head},
                {"params": net.trunk, "lr": 0.01},
                {"order_params": net.trainable_params()},
            ],
            groups,
        )

    def test_what_is_refused(self) -> None:
        """What holds one parameter twice, has no list to choose from, or is no group."""
        _, net = pair()
        for params, error, text in (
            ([{"params": net}, {"params": net.head}], lazycell.LazyCellError, "head.weight is in two .*, 0 and 1"),
            ([{"params": lambda p: True}], lazycell.LazyCellError, "no other group says over which parameters"),
            ([{"parameters": net}], TypeError, "a dict with an entry 'params'"),
            (3, TypeError, "but got int"),
            ([3], TypeError, "but got int"),
            ([], lazycell.LazyCellError, "no parameters"),
        ):
            with pytest.raises(error, match=text):
                lazycell.LazyOptimizer(nn.Adam, params)
        for factory in (3, None, print, dict):
            with pytest.raises(TypeError, match="takes a class of optimizers first"):
                lazycell.LazyOptimizer(factory, net)

    def test_add_param_group(self) -> None:
        """As experimental.optim has it."""
        _, net = pair()
        optimizer = lazycell.LazyOptimizer(experimental.SGD, [{"params": net.head}], lr=0.1, momentum=0.9)
        function = lazycell.value_and_grad(loss_of(net), None, optimizer.parameters)
        optimizer(function(batch(0))[1])
        moments = bits(optimizer.state_dict()["accum.head.weight"])
        optimizer.add_param_group({"params": net.trunk, "lr": 0.01})
        assert len(optimizer.parameters) == 4 and len(optimizer.param_groups) == 2
        assert bits(optimizer.state_dict()["accum.head.weight"]) == moments
        optimizer(function(batch(1))[1])


class TestMisalignment:
    """What doesn't fit is refused by name, before anything is updated."""

    def stepped(self) -> tuple[nn.Cell, Any, Any]:
        """A net, its optimizer after a step, and new gradients."""
        _, net = pair()
        optimizer = lazycell.LazyOptimizer(nn.Adam, net)
        function = lazycell.value_and_grad(loss_of(net), None, optimizer.parameters)
        optimizer(function(batch(0))[1])
        return net, optimizer, function(batch(1))[1]

    @pytest.mark.parametrize(
        ("change", "text"),
        [
            (lambda g, n: tuple(g[:2]), "2 gradients for 4 parameters.*trunk.weight"),
            (lambda g, n: (*g, g[0]), "5 gradients for 4 parameters"),
            (lambda g, n: tuple(reversed(g)), "gradient of trunk.weight has shape.*2.*parameter has shape.*3"),
            (lambda g, n: (None, *g[1:]), "gradient of trunk.weight has shape None"),
            (lambda g, n: lazycell.grad(loss_of(n), None, n.head)(batch(0)), "there is none of trunk.weight"),
            (lambda g, n: foreign(), "trunk.weight, trunk.bias, head.weight, head.bias is not among them"),
        ],
    )
    def test_refused(self, change: Callable[..., Any], text: str) -> None:
        """Too few, too many, in another order, of another net."""
        net, optimizer, gradients = self.stepped()
        kept = {n: bits(p) for n, p in [*net.parameters_dict().items(), *optimizer.state_dict().items()]
                if not is_deferred(p)}  # fmt: skip
        with pytest.raises(lazycell.LazyCellError, match=text):
            optimizer(change(gradients, net))
        now = {**net.parameters_dict(), **optimizer.state_dict()}
        assert all(bits(now[name]) == value for name, value in kept.items())
        optimizer(gradients)
        assert bits(net.head.weight) != kept["head.weight"]

    def test_other_order(self) -> None:
        """Gradients that know their parameters may come in any order."""
        net, optimizer, gradients = self.stepped()
        turned = lazycell.grad(loss_of(net), None, list(reversed(gradients.parameters)))(batch(1))
        other, other_optimizer, same = self.stepped()
        optimizer(turned)
        other_optimizer(same)
        assert [bits(p) for p in optimizer.parameters] == [bits(p) for p in other_optimizer.parameters]

    def test_touched_between(self) -> None:
        """A layer that is touched between gradient and step joins at the next one."""
        net, optimizer, gradients = self.stepped()
        net(batch(0), True)
        before = bits(net.branch.weight)
        optimizer(gradients)
        assert bits(net.branch.weight) == before and len(optimizer.parameters) == 6
        with pytest.raises(lazycell.LazyCellError, match="4 gradients for 6 parameters"):
            optimizer(tuple(gradients))


def foreign() -> Any:
    """Gradients of another net."""
    net = make(lazycell.LazyCell)
    return lazycell.grad(loss_of(net), None, net)(batch(0))


class TestBeforeItIsBorn:
    """Nothing has been touched."""

    def test_attributes(self) -> None:
        """What needs the native optimizer says what to do; what doesn't, works."""
        _, net = pair()
        optimizer = lazycell.LazyOptimizer(nn.Adam, net, learning_rate=0.1)
        assert len(optimizer.parameters) == 0 and optimizer.state_dict() == {}
        with pytest.raises(lazycell.UntouchedError, match=r"LazyOptimizer\(Adam\) has no global_step yet.*dry_run"):
            optimizer.global_step  # noqa: B018
        assert not hasattr(optimizer, "global_step")
        with pytest.raises(lazycell.UntouchedError):
            optimizer((ones(1),))
        repr(optimizer)
        lazycell.dry_run(net, lazycell.spec(4, 3))
        assert int(optimizer.global_step.asnumpy()[0]) == 0 and len(optimizer.moment1) == 4
        assert float(optimizer.get_lr().asnumpy()) == pytest.approx(0.1)

    def test_properties_can_be_set(self) -> None:
        """They hold for every native optimizer to come."""
        _, net = pair()
        optimizer = lazycell.LazyOptimizer(nn.LazyAdam, net)
        optimizer.unique = False
        net(batch(0))
        assert optimizer.unique is False and optimizer._whole("unique").unique is False

    def test_it_doesnt_keep_a_net_from_being_collected(self) -> None:
        """Nothing global holds it."""
        _, net = pair()
        optimizer = lazycell.LazyOptimizer(nn.Adam, net)
        function = lazycell.value_and_grad(loss_of(net), None, optimizer.parameters)
        optimizer(function(batch(0))[1])
        gc.collect()
        before = len(_aligned.participants)
        del optimizer, function, net
        gc.collect()
        assert len(_aligned.participants) == before - 1

    def test_an_iterator_as_schedule(self) -> None:
        """It is read once, and serves every native optimizer."""
        _, net = pair()
        optimizer = lazycell.LazyOptimizer(nn.SGD, net, iter([0.1] * 10))
        function = lazycell.value_and_grad(loss_of(net), None, optimizer.parameters)
        for step in range(4):
            optimizer(function(batch(step), step > 1)[1])


def test_schedulers_of_experimental_optim() -> None:
    """They hold the lazy optimizer, and what they set holds after growth, for every set of active parameters."""
    _, net = pair()
    lazycell.dry_run(net, lazycell.spec(4, 3))
    optimizer = lazycell.LazyOptimizer(experimental.SGD, net, lr=0.5)
    scheduler = experimental.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    function = lazycell.value_and_grad(loss_of(net), None, optimizer.parameters)
    for step in range(4):
        flag = step % 2 == 1
        value, gradients = function(batch(step), flag)
        before = net.head.bias.asnumpy().copy()
        optimizer(gradients)
        by_name = {p.name: g for p, g in zip(gradients.parameters, gradients)}
        expected = before - 0.5 ** (step + 1) * by_name["head.bias"].asnumpy()
        assert np.allclose(net.head.bias.asnumpy(), expected, rtol=1e-5)
        scheduler.step()
    optimizer.param_groups[0]["weight_decay"] = 0.0
    assert float(scheduler.get_last_lr()[0]) == pytest.approx(0.5**5)


def test_freezing_between_steps() -> None:
    """What is frozen leaves, stays as it is, and finds its state when it comes back."""
    _, net = pair()
    optimizer = lazycell.LazyOptimizer(nn.Momentum, net, 0.1, 0.9, weight_decay=0.1)
    function = lazycell.value_and_grad(loss_of(net), None, optimizer.parameters)
    optimizer(function(batch(0))[1])
    moment = bits(optimizer.state_dict()["moments.trunk.weight"])
    lazycell.freeze(net.trunk)
    before = bits(net.trunk.weight)
    optimizer(function(batch(1))[1])
    assert bits(net.trunk.weight) == before and len(optimizer.parameters) == 2
    lazycell.unfreeze(net.trunk)
    assert bits(optimizer.state_dict()["moments.trunk.weight"]) == moment
    optimizer(function(batch(2))[1])
    assert bits(net.trunk.weight) != before


class TestCheckpoints:
    """State by name."""

    def run(self, net: nn.Cell, optimizer: Any, steps: range) -> None:
        """Train; the branch is taken from step 3 on, now and then, and the trunk is frozen at step 8."""
        function = lazycell.value_and_grad(loss_of(net), None, optimizer.parameters)
        for step in steps:
            if step == 8:
                lazycell.freeze(net.trunk)
            optimizer(function(batch(step), step >= 3 and step % 3 == 0)[1])

    @pytest.mark.parametrize("stop", [2, 5, 9])
    @pytest.mark.parametrize("name", ["Adam", "AdamWeightDecay", "experimental.AdamW", "Momentum, a schedule"])
    def test_resuming(self, name: str, stop: int, tmp_path: Path) -> None:
        """A run that was stopped and resumed ends with the weights and the state of one that never was."""
        factory, options = OPTIMIZERS[name]
        _, net = pair()
        optimizer = lazycell.LazyOptimizer(factory, net, **options)
        self.run(net, optimizer, range(14))
        _, first = pair()
        early = lazycell.LazyOptimizer(factory, first, **options)
        self.run(first, early, range(stop))
        ms.save_checkpoint(first, str(tmp_path / "net.ckpt"), append_dict=lazycell.freeze_state(first))
        ms.save_checkpoint(early, str(tmp_path / "optimizer.ckpt"))
        _, second = pair(value=7)
        late = lazycell.LazyOptimizer(factory, second, **options)
        late.load_state_dict(ms.load_checkpoint(str(tmp_path / "optimizer.ckpt")))
        saved = ms.load_checkpoint(str(tmp_path / "net.ckpt"))
        lazycell.load_freeze_state(second, saved)
        ms.load_param_into_net(second, saved)
        self.run(second, late, range(stop, 14))
        for one, other in zip(net.get_parameters(), second.get_parameters(), strict=True):
            assert (one.name, one.requires_grad) == (other.name, other.requires_grad)
            assert "dead" in one.name or bits(one) == bits(other), one.name
        states, others = optimizer.state_dict(), late.state_dict()
        assert states.keys() == others.keys()
        assert [n for n in states if bits(states[n]) != bits(others[n])] == []

    def test_state_that_waits(self, tmp_path: Path) -> None:
        """What belongs to layers that this run hasn't touched is kept, saved again, and used when it does."""
        _, net = pair()
        optimizer = lazycell.LazyOptimizer(nn.Adam, net)
        function = lazycell.value_and_grad(loss_of(net), None, optimizer.parameters)
        optimizer(function(batch(0), True)[1])
        state = optimizer.state_dict()
        _, other = pair()
        late = lazycell.LazyOptimizer(nn.Adam, other)
        late.load_state_dict(state)
        step = lazycell.value_and_grad(loss_of(other), None, late.parameters)
        late(step(batch(1))[1])
        ms.save_checkpoint(late, str(tmp_path / "late.ckpt"))
        again = ms.load_checkpoint(str(tmp_path / "late.ckpt"))
        assert bits(again["moment1.branch.weight"]) == bits(state["moment1.branch.weight"])
        assert state.keys() == again.keys()

    @pytest.mark.parametrize("born", [False, True])
    @pytest.mark.parametrize("factory", [experimental.NAdam, nn.AdaFactor, nn.ASGD])
    def test_states_of_other_names_that_wait(self, factory: type, born: bool) -> None:
        """Whatever MindSpore joins names with, state of layers to come is kept."""
        options = {"lr": 0.1} if factory is experimental.NAdam else {"learning_rate": 0.1}
        options |= {"scale_parameter": False, "relative_step": False} if factory is nn.AdaFactor else {}
        _, net = pair()
        optimizer = lazycell.LazyOptimizer(factory, net, **options)
        function = lazycell.value_and_grad(loss_of(net), None, optimizer.parameters)
        optimizer(function(batch(0), True)[1])
        state = {name: Tensor(value.asnumpy()) for name, value in optimizer.state_dict().items()}
        _, other = pair()
        late = lazycell.LazyOptimizer(factory, other, **options)
        step = lazycell.value_and_grad(loss_of(other), None, late.parameters)
        if born:
            late(step(batch(5))[1])
        late.load_state_dict(state)
        late(step(batch(1))[1])
        waiting = [name for name in state if "branch" in name]
        assert waiting and all(bits(late.state_dict()[name]) == bits(state[name]) for name in waiting)

    def test_groups_that_wait(self) -> None:
        """The learning rate of a group that is empty so far is kept, too."""
        _, net = pair()
        groups = [{"params": net.branch, "lr": 0.001}, {"params": net.trunk, "lr": 0.01}, {"params": net.head}]
        optimizer = lazycell.LazyOptimizer(nn.Adam, groups, 0.1)
        optimizer(lazycell.value_and_grad(loss_of(net), None, optimizer.parameters)(batch(0), True)[1])
        _, other = pair()
        groups = [{"params": other.branch, "lr": 0.5}, {"params": other.trunk, "lr": 0.5}, {"params": other.head}]
        late = lazycell.LazyOptimizer(nn.Adam, groups, 0.1)
        late.load_state_dict(optimizer.state_dict())
        step = lazycell.value_and_grad(loss_of(other), None, late.parameters)
        late(step(batch(1))[1])
        late(step(batch(2), True)[1])
        assert float(late.state_dict()["learning_rate_group_0"].asnumpy()) == pytest.approx(0.001)

    def test_loading_copies(self) -> None:
        """A step of one optimizer doesn't move the state that another took over."""
        _, net = pair()
        optimizer = lazycell.LazyOptimizer(nn.Adam, net)
        function = lazycell.value_and_grad(loss_of(net), None, optimizer.parameters)
        optimizer(function(batch(0))[1])
        for born in (False, True):
            _, other = pair()
            late = lazycell.LazyOptimizer(nn.Adam, other)
            step = lazycell.value_and_grad(loss_of(other), None, late.parameters)
            if born:
                late(step(batch(1))[1])
            late.load_state_dict(optimizer.state_dict())
            kept = {name: bits(value) for name, value in optimizer.state_dict().items()}
            late(step(batch(2))[1])
            assert kept == {name: bits(value) for name, value in optimizer.state_dict().items()}

    def test_loaded_too_early(self) -> None:
        """Other dtypes are converted, wrong shapes can be replaced, and strict=False holds at the first step."""
        _, net = pair()
        optimizer = lazycell.LazyOptimizer(nn.Adam, net)
        function = lazycell.value_and_grad(loss_of(net), None, optimizer.parameters)
        gradients = function(batch(0))[1]
        optimizer.load_state_dict({"moment1.trunk.weight": ones(2, 2)})
        with pytest.raises(lazycell.LazyCellError, match="moment1.trunk.weight has shape"):
            optimizer(gradients)
        half = Tensor(np.ones((3, 3)), ms.float16)
        optimizer.load_state_dict({"moment1.trunk.weight": half, "epoch": Tensor(3)}, strict=False)
        optimizer(gradients)
        assert optimizer.state_dict()["moment1.trunk.weight"].dtype == ms.float32
        assert "epoch" not in optimizer.state_dict()

    def test_state_of_another_class(self) -> None:
        """It is refused."""
        _, net = pair()
        optimizer = lazycell.LazyOptimizer(nn.AdamWeightDecay, net)
        function = lazycell.value_and_grad(loss_of(net), None, optimizer.parameters)
        optimizer(function(batch(0))[1])
        state = {n: p for n, p in optimizer.state_dict().items() if "." in n}
        other = lazycell.LazyOptimizer(nn.RMSProp, net)
        other.state_dict()
        with pytest.raises(lazycell.LazyCellError, match="adam_m"):
            other.load_state_dict(state)
        unborn = pair()[1]
        early = lazycell.LazyOptimizer(nn.RMSProp, unborn)
        early.load_state_dict(state)
        with pytest.raises(lazycell.LazyCellError, match="adam_m"):
            early(lazycell.grad(loss_of(unborn), None, early.parameters)(batch(0)))

    @pytest.mark.parametrize("born", [False, True])
    def test_state_of_something_else(self, born: bool) -> None:
        """It is refused, by name, and changes nothing; the net's own values in the same file are left out."""
        _, net = pair()
        optimizer = lazycell.LazyOptimizer(nn.Adam, net)
        function = lazycell.value_and_grad(loss_of(net), None, optimizer.parameters)
        if born:
            optimizer(function(batch(0))[1])
        own = {**net.parameters_dict(), **lazycell.freeze_state(net)} if born else {}
        optimizer.load_state_dict({name: value for name, value in own.items() if name in net.parameters_dict()})
        wrong = {"moment1.other.weight": ones(3, 3)}
        if born:
            with pytest.raises(lazycell.LazyCellError, match="moment1.other.weight"):
                optimizer.load_state_dict(wrong)
        else:
            optimizer.load_state_dict(wrong)
            _, gradients = function(batch(0))
            before = bits(net.head.weight)
            with pytest.raises(lazycell.LazyCellError, match="moment1.other.weight"):
                optimizer(gradients)
            assert bits(net.head.weight) == before
        if born:
            wrong = {"moment1.trunk.weight": ones(2, 2), "moment2.trunk.weight": ones(3, 3)}
            kept = bits(optimizer.state_dict()["moment2.trunk.weight"])
            with pytest.raises(lazycell.LazyCellError, match="moment1.trunk.weight has shape"):
                optimizer.load_state_dict(wrong)
            assert bits(optimizer.state_dict()["moment2.trunk.weight"]) == kept
            optimizer.load_state_dict({"moment1.other.weight": ones(3, 3)}, strict=False)


class TestStatesOfOtherKinds:
    """Optimizers of one's own, and states that aren't named as MindSpore names them."""

    class Chain(nn.Cell):
        """Three layers of one shape, the middle one optional."""

        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Dense(3, 3, has_bias=False) for _ in range(3))

        def construct(self, x, flag):
            x = self.a(x)
            if flag:
                x = self.b(x)
            return self.c(x).sum()

    @staticmethod
    def optimizer(names_: str, style: type) -> type:
        """A momentum of one's own, its states named and kept in some way."""

        class Own(style):
            def __init__(self, params, lr):
                super().__init__(*((lr, params) if style is nn.Optimizer else (params, {"lr": lr})))
                named = {"numbers": "m_{}", "none": None, "prefix": "m.{}", "suffix": "m_{}"}[names_]
                made = []
                for index, p in enumerate(self.parameters):
                    key = index if names_ == "numbers" else p.name
                    zeros = Tensor(np.zeros(p.shape, np.float32))
                    made.append(Parameter(zeros, name=named.format(key)) if named else Parameter(zeros))
                if style is nn.Optimizer:
                    self.m = made
                else:
                    for p, m in zip(self.parameters, made):
                        self.state[p]["m"] = m

            def construct(self, gradients):
                moments = self.m if style is nn.Optimizer else [self.state[p]["m"] for p in self.parameters]
                for p, m, g in zip(self.parameters, moments, gradients):
                    ops.assign(m, m * 0.9 + g)
                    ops.assign(p, p - 0.1 * m)
                return True

        return Own

    @pytest.mark.parametrize(
        ("names_", "style"),
        [("numbers", nn.Optimizer), ("none", nn.Optimizer), ("prefix", nn.Optimizer), ("suffix", nn.Optimizer),
         ("prefix", experimental.Optimizer)],
    )  # fmt: skip
    def test_state_stays_with_its_parameter(self, names_: str, style: type) -> None:
        """Through growth, rest and return."""
        seed()
        plain = self.Chain()
        seed()
        net = lazycell.track(self.Chain())
        factory = self.optimizer(names_, style)
        alone = {p.name: factory([p], 0.1) for p in plain.trainable_params()}
        optimizer = lazycell.LazyOptimizer(factory, net, 0.1)
        function = lazycell.value_and_grad(net, None, optimizer.parameters)
        for step in range(8):
            flag = step in (2, 3, 6)
            weights = [p for p in plain.trainable_params() if flag or p.name != "b.weight"]
            for p, g in zip(weights, ms.grad(plain, None, weights)(batch(step), flag)):
                alone[p.name]((g,))
            optimizer(function(batch(step), flag)[1])
        assert_same(plain, net)
        assert len([n for n in optimizer.state_dict() if "m" in n.split(".")[0].split("_")]) == 3

    def test_parameters_whose_names_look_like_groups(self) -> None:
        """A parameter's own name is never taken for the number of a group."""

        class Net(nn.Cell):
            def __init__(self) -> None:
                super().__init__()
                self.unused = nn.Dense(3, 3)
                for i in range(2):
                    value = Tensor(np.full(3, i + 1, np.float32))
                    setattr(self, f"w_group_{i}", Parameter(value, name=f"w_group_{i}"))

            def construct(self, x):
                return (x * self.w_group_0 * self.w_group_1).sum()

        net = lazycell.track(Net())
        groups = [{"params": net.unused}, {"params": [net.w_group_0]}, {"params": [net.w_group_1]}]
        optimizer = lazycell.LazyOptimizer(nn.Momentum, groups, 0.1, 0.9)
        optimizer(lazycell.grad(net, None, optimizer.parameters)(ones(2, 3)))
        assert {n for n in optimizer.state_dict() if "moments" in n} == {"moments.w_group_0", "moments.w_group_1"}

    def test_states_that_cant_be_told_apart(self) -> None:
        """They are refused."""

        class Twice(nn.Momentum):
            def __init__(self, params, *args):
                super().__init__(params, *args)
                self.one, self.two = (Parameter(Tensor(np.float32(i)), name="twice") for i in range(2))

        _, net = pair()
        net(batch(0))
        with pytest.raises(lazycell.LazyCellError, match="Twice has two states named twice"):
            lazycell.LazyOptimizer(Twice, net, 0.1, 0.9).state_dict()

    def test_a_layer_that_is_replaced(self) -> None:
        """The new one starts with fresh state, whatever its shape."""
        for size in (2, 5):
            _, net = pair()
            optimizer = lazycell.LazyOptimizer(nn.Momentum, net, 0.1, 0.9)
            function = lazycell.value_and_grad(lambda x, net=net: net(x).sum(), None, optimizer.parameters)
            optimizer(function(batch(0))[1])
            trunk = bits(optimizer.state_dict()["moments.trunk.weight"])
            net.head = nn.Dense(3, size)
            net(batch(0))
            state = optimizer.state_dict()
            assert not state["moments.head.weight"].asnumpy().any()
            assert state["moments.head.weight"].shape == (size, 3) and bits(state["moments.trunk.weight"]) == trunk
            optimizer(function(batch(1))[1])


class TestAttributes:
    """What is set on the optimizer holds in every native one."""

    def test_hyper_parameters(self) -> None:
        """Before the first step, between steps, and for sets of parameters to come."""

        class Scaled(nn.Optimizer):
            def __init__(self, params, learning_rate):
                super().__init__(learning_rate, params)
                self.scale = 1.0

            def construct(self, gradients):
                for p, g in zip(self.parameters, gradients):
                    ops.assign(p, p - self.scale * g)
                return True

            def halve(self):
                self.scale = self.scale * 0.5

        _, net = pair()
        optimizer = lazycell.LazyOptimizer(Scaled, net, 0.1)
        optimizer.scale = 0.5
        function = lazycell.value_and_grad(loss_of(net), None, optimizer.parameters)
        expected = 0.5
        for step in range(6):
            gradients = function(batch(step), step % 2 == 1)[1]
            before = net.head.bias.asnumpy().copy()
            optimizer(gradients)
            by_name = {p.name: g for p, g in zip(gradients.parameters, gradients)}
            assert np.allclose(net.head.bias.asnumpy(), before - expected * by_name["head.bias"].asnumpy(), rtol=1e-5)
            if step == 2:
                optimizer.halve()
                expected = optimizer.scale
                assert expected == 0.25

    def test_a_learning_rate_that_is_a_parameter(self) -> None:
        """It can be assigned to, and be replaced."""
        _, net = pair()
        optimizer = lazycell.LazyOptimizer(nn.SGD, net, 0.1)
        function = lazycell.value_and_grad(loss_of(net), None, optimizer.parameters)
        optimizer(function(batch(0))[1])
        ops.assign(optimizer.learning_rate, Tensor(0.0, ms.float32))
        before = bits(net.head.weight)
        for flag in (False, True):
            optimizer(function(batch(1), flag)[1])
        assert bits(net.head.weight) == before and float(optimizer.get_lr().asnumpy()) == 0

    def test_wrong_arguments(self) -> None:
        """They are refused when it is built, where the class says what it takes."""

        class Strict(nn.SGD):
            def __init__(self, params, rate):
                super().__init__(params, rate)

        _, net = pair()
        with pytest.raises(TypeError, match="rat"):
            lazycell.LazyOptimizer(Strict, net, rat=0.1)

    def test_looking_at_it(self) -> None:
        """Before the first touch and after it."""
        _, net = pair()
        optimizer = lazycell.LazyOptimizer(experimental.SGD, net, lr=0.1)
        assert repr(optimizer) == "LazyOptimizer(SGD, nothing touched yet)"
        with pytest.warns(lazycell.UntouchedWarning, match=r"LazyOptimizer\(SGD\) has no state yet.*load_state_dict"):
            ms.load_param_into_net(optimizer, {"state_step": Parameter(ones(1))})
        net(batch(0))
        assert "lr: 0.1" in repr(optimizer)
        with pytest.raises(lazycell.LazyCellError, match="can't be copied"):
            copy.deepcopy(optimizer)


class TestGroupsThatGrow:
    """Groups keep their places, whoever is in them."""

    def test_schedulers_reach_groups_that_are_empty_at_first(self) -> None:
        """A group's rate follows the schedule while it waits, and its dict is the same later."""
        _, net = pair()
        lazycell.dry_run(net, lazycell.spec(4, 3))
        groups = [{"params": net.branch, "lr": 0.25}, {"params": net.trunk, "lr": 0.5}, {"params": net.head, "lr": 1.0}]
        optimizer = lazycell.LazyOptimizer(experimental.SGD, groups, lr=0.5)
        scheduler = experimental.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        first = optimizer.param_groups[0]
        function = lazycell.value_and_grad(loss_of(net), None, optimizer.parameters)
        for step in range(4):
            gradients = function(batch(step), step >= 2)[1]
            before = net.branch.bias.asnumpy().copy()
            optimizer(gradients)
            if step >= 2:
                by_name = {p.name: g.asnumpy() for p, g in zip(gradients.parameters, gradients)}
                expected = before - 0.25 * 0.5**step * by_name["branch.bias"]
                assert np.allclose(net.branch.bias.asnumpy(), expected, rtol=1e-5)
            scheduler.step()
        assert optimizer.param_groups[0] is first and names(first["params"]) == ["branch.weight", "branch.bias"]
        rates = [float(group["lr"].asnumpy()) for group in optimizer.param_groups]
        assert rates == [0.25 / 16, 0.5 / 16, 1.0 / 16]

    def test_predicates_are_asked_once(self) -> None:
        """Who belongs where doesn't change with what a predicate says later."""
        _, net = pair()
        slow: set[str] = set()
        groups = [{"params": lambda p: p.name in slow, "lr": 0.001}, {"params": net}]
        optimizer = lazycell.LazyOptimizer(nn.SGD, groups, 0.1)
        slow.add("head.weight")
        function = lazycell.value_and_grad(loss_of(net), None, optimizer.parameters)
        optimizer(function(batch(0))[1])
        assert names(optimizer.parameters) == names(optimizer._whole("parameters").parameters)


class TestActivity:
    """Who took part, in ways that are easy to get wrong."""

    @pytest.mark.parametrize("how", ["replaced", "a tuple"])
    def test_a_step_that_was_skipped(self, how: str) -> None:
        """What took part in gradients that were thrown away doesn't count in the next step."""
        _, net = pair()
        optimizer = lazycell.LazyOptimizer(nn.AdamWeightDecay, net, 0.1, weight_decay=0.1)
        function = lazycell.value_and_grad(loss_of(net), None, optimizer.parameters)
        optimizer(function(batch(0), True)[1])
        function(batch(1), True)  # an overflow, say
        before = bits(net.branch.weight)
        gradients = function(batch(2), False)[1]
        clipped = ops.clip_by_global_norm(gradients, 1.0)
        optimizer(gradients.replace(clipped) if how == "replaced" else clipped)
        assert bits(net.branch.weight) == before

    def test_sums_that_are_made_by_hand(self) -> None:
        """A branch that one of the steps took takes part, in whichever order they came."""
        for flags in ((True, False), (False, True)):
            _, net = pair()
            optimizer = lazycell.LazyOptimizer(nn.SGD, net, 0.1)
            function = lazycell.value_and_grad(loss_of(net), None, optimizer.parameters)
            optimizer(function(batch(0), True)[1])
            before = bits(net.branch.weight)
            one, two = (function(batch(1 + i), flag)[1] for i, flag in enumerate(flags))
            optimizer(tuple(a + b for a, b in zip(one, two)))
            assert bits(net.branch.weight) != before

    @pytest.mark.parametrize("way", ["set_grad", "return_ids"])
    def test_other_ways_to_compute_gradients(self, way: str) -> None:
        """A branch that wasn't taken rests there, too."""
        if way == "set_grad" and not _recording._CAN_BE_ASKED:
            pytest.skip("MindSpore before 2.9 can't be asked whether it takes a forward pass that has run")
        _, net = pair()

        class WithLoss(nn.Cell):
            def __init__(self) -> None:
                super().__init__()
                self.net = net

            def construct(self, x, flag=False):
                return ((self.net(x, flag) - 1) ** 2).mean()

        optimizer = lazycell.LazyOptimizer(nn.AdamWeightDecay, net, 0.1, weight_decay=0.1)
        fn = WithLoss()
        if way == "set_grad":
            fn.set_grad()
        function = lazycell.grad(fn, None, optimizer.parameters, return_ids=way == "return_ids")

        def step(index: int, flag: bool) -> None:
            gradients = function(batch(index), flag)
            optimizer(tuple(g for _, g in gradients) if way == "return_ids" else gradients)

        step(0, True)
        before = bits(net.branch.weight)
        step(1, False)
        assert bits(net.branch.weight) == before
        step(2, True)
        assert bits(net.branch.weight) != before

    def test_weights_that_were_listed_too_early(self) -> None:
        """A branch that a fixed list lacks is an error, not a branch that is never trained."""
        _, net = pair()
        net(batch(0))
        optimizer = lazycell.LazyOptimizer(nn.Momentum, net, 0.1, 0.9)
        function = lazycell.value_and_grad(loss_of(net), None, list(net.trainable_params()))
        optimizer(function(batch(0))[1])
        net(batch(0), True)
        with pytest.raises(lazycell.LazyCellError, match="there is none of branch.weight"):
            optimizer(function(batch(1), True)[1])

    def test_everything_is_frozen(self) -> None:
        """That is said, rather than that nothing was touched."""
        _, net = pair()
        net(batch(0))
        optimizer = lazycell.LazyOptimizer(nn.Momentum, net, 0.1, 0.9)
        lazycell.freeze(net)
        with pytest.raises(lazycell.LazyCellError, match="are frozen"):
            optimizer(())


class Many(nn.Cell):
    """Layers of which any may be chosen."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.layers = nn.CellList([nn.Dense(size, size, has_bias=False) for _ in range(8)])

    def construct(self, x, chosen):
        for index in chosen:
            x = self.layers[index](x)
        return (x * x).mean()


SETS = [tuple(i for i in range(8) if mask >> i & 1) for mask in range(1, 256, 5)]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["Momentum", "Adam", "experimental.AdamW"])
def test_many_sets_of_active_parameters(name: str, mode: str) -> None:
    """Whatever takes part together, each parameter and its state are what native optimizers over just these give."""
    factory, options = OPTIMIZERS[name]
    seed()
    plain = Many(3)
    seed()
    net = lazycell.track(Many(3))
    by_hand = ByHand(factory, options, plain)
    optimizer = lazycell.LazyOptimizer(factory, net, **options)
    function = lazycell.grad(net, None, optimizer.parameters)
    ms.set_context(mode=MODES[mode])
    for step, chosen in enumerate(SETS[:20] if mode == "PyNative" else SETS[:7]):
        weights = [plain.layers[index].weight for index in chosen]
        by_hand.update(weights, ms.grad(plain, None, weights)(batch(step), chosen))
        optimizer(function(batch(step), chosen))
    if mode == "Graph":
        close(plain, net)
        return
    assert_same(plain, net)
    states = optimizer.state_dict()
    for key, state in by_hand.known.items():
        assert bits(state) == bits(states[key]), key


def test_many_sets_of_active_parameters_cost_no_memory() -> None:
    """All native optimizers use the same state, and their number is limited."""
    net, x = lazycell.track(Many(512)), ones(1, 512)
    optimizer = lazycell.LazyOptimizer(nn.Adam, net, 0.1)
    function = lazycell.grad(net, None, optimizer.parameters)
    for chosen in (tuple(range(8)), *SETS[:8]):
        optimizer(function(x, chosen))
    before = resident_bytes()
    for chosen in SETS:
        optimizer(function(x, chosen))
    assert resident_bytes() - before < 60 * 2**20  # one set of moments alone is 16 MB
    assert len(optimizer.state_dict()) == 4 + 16


class TestGraphs:
    """In Graph mode, and inside jitted functions."""

    @pytest.mark.parametrize("name", ["Momentum", "AdamWeightDecay"])
    def test_a_jitted_step(self, name: str) -> None:
        """It works after a dry run, and a branch that is compiled later joins in the same call."""
        factory, options = OPTIMIZERS[name]
        pruned, net = pair()
        lazycell.dry_run(net, lazycell.spec(4, 3))
        optimizer = lazycell.LazyOptimizer(factory, net, **options)
        function = lazycell.value_and_grad(loss_of(net), None, optimizer.parameters)

        @ms.jit
        def step(x, flag):
            value, gradients = function(x, flag)
            optimizer(gradients)
            return value

        weights = [p for p in pruned.trainable_params() if "branch" not in p.name]
        by_hand = ByHand(factory, options, pruned)
        for index in range(3):
            step(batch(index), False)
            by_hand.step(batch(index), False)
        close(pruned, net)
        assert names(optimizer.parameters) == names(weights)
        for index in range(3):
            step(batch(index), True)
            by_hand.step(batch(index), True)
        close(pruned, net)
        assert len(optimizer.parameters) == 6 and is_deferred(net.dead.weight)

    def test_untouched(self) -> None:
        """Before anything was touched, a jitted step says so."""
        _, net = pair()
        optimizer = lazycell.LazyOptimizer(nn.Adam, net)

        @ms.jit
        def step(gradients):
            return optimizer(gradients)

        with pytest.raises(lazycell.UntouchedError, match=r"LazyOptimizer\(Adam\) has no construct yet"):
            step((ones(3, 3),))

    @pytest.mark.parametrize("mode", MODES)
    def test_train_one_step_cell(self, mode: str) -> None:
        """MindSpore's own training cell takes it as any other optimizer."""
        pruned, net = pair()
        optimizer = lazycell.LazyOptimizer(nn.Momentum, net, 0.1, 0.9)
        if mode == "Graph":
            lazycell.dry_run(net, lazycell.spec(4, 3))
        ms.set_context(mode=MODES[mode])
        weights = [p for p in pruned.trainable_params() if "branch" not in p.name]
        target = Tensor(np.ones((4, 2), np.float32))
        steps = [
            nn.TrainOneStepCell(nn.WithLossCell(model, nn.MSELoss()), chosen)
            for model, chosen in ((pruned, nn.Momentum(weights, 0.1, 0.9)), (net, optimizer))
        ]
        for index in range(4):
            one, other = (step(batch(index), target) for step in steps)
            assert bits(one) == bits(other)
        assert_same(pruned, net)
        assert is_deferred(net.dead.weight)

    def test_model_train(self) -> None:
        """So does Model.train()."""
        pruned, net = pair()
        data = [(np.random.RandomState(i).randn(3).astype(np.float32), np.ones(2, np.float32)) for i in range(16)]
        for model, make_optimizer in (
            (pruned, lambda m: nn.Momentum([p for p in m.trainable_params() if "branch" not in p.name], 0.1, 0.9)),
            (net, lambda m: lazycell.LazyOptimizer(nn.Momentum, m, 0.1, 0.9)),
        ):
            dataset = ms.dataset.GeneratorDataset(data, ["x", "y"], shuffle=False).batch(4)
            ms.Model(model, nn.MSELoss(), make_optimizer(model)).train(2, dataset, dataset_sink_mode=False)
        assert_same(pruned, net)


def close(pruned: nn.Cell, net: nn.Cell) -> None:
    """Two graphs that were fused otherwise may round otherwise."""
    by_name = net.parameters_dict()
    for parameter in pruned.get_parameters():
        assert np.allclose(parameter.asnumpy(), by_name[parameter.name].asnumpy(), rtol=1e-5, atol=1e-6), parameter.name


KILLED = """
import os, sys
import mindspore as ms
sys.path.insert(0, {tests!r})
from test_optimizer import TestCheckpoints, lazycell, nn, pair
ms.set_device({device!r})
_, net = pair()
optimizer = lazycell.LazyOptimizer(nn.Adam, net, 0.01)
start, stop = map(int, sys.argv[1:3])
if start:
    optimizer.load_state_dict(ms.load_checkpoint(sys.argv[3] + "/optimizer.ckpt"))
    saved = ms.load_checkpoint(sys.argv[3] + "/net.ckpt")
    lazycell.load_freeze_state(net, saved)
    ms.load_param_into_net(net, saved)
TestCheckpoints().run(net, optimizer, range(start, stop))
ms.save_checkpoint(net, sys.argv[3] + "/net.ckpt", append_dict=lazycell.freeze_state(net))
ms.save_checkpoint(optimizer, sys.argv[3] + "/optimizer.ckpt")
os._exit(9 if stop == 30 else 0)
"""


@pytest.mark.filterwarnings("ignore")
def test_a_run_that_is_killed(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Killed after step 30 and resumed by another process, it has at step 60 the bits of a run that never stopped."""
    script = KILLED.format(tests=str(Path(__file__).parent), device=request.config.getoption("--device-target"))
    for folder, parts in (("whole", [(0, 60)]), ("parts", [(0, 30), (30, 60)])):
        (tmp_path / folder).mkdir()
        for start, stop in parts:
            command = [sys.executable, "-W", "ignore", "-c", script, str(start), str(stop), str(tmp_path / folder)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=300)
            assert done.returncode == (9 if stop == 30 else 0), done.stderr[-2000:]
    for file in ("net.ckpt", "optimizer.ckpt"):
        whole, parts = (ms.load_checkpoint(str(tmp_path / folder / file)) for folder in ("whole", "parts"))
        assert whole.keys() == parts.keys()
        assert all(bits(whole[name]) == bits(parts[name]) for name in whole if "dead" not in name)
