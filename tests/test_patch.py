"""The global patch: what unmodified scripts gain, and that nothing of it stays."""

from __future__ import annotations

import copy
import functools
import gc
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import mindspore as ms
import numpy as np
import pytest
import scripts
from helpers import bits, deferred, is_deferred, names, ones, seed, stream, touched
from hypothesis import given, settings
from mindspore import Parameter, Tensor, mint, nn, ops
from mindspore.experimental import optim
from scripts import DEAD, Net, Pruned
from strategies import Block, build, inputs, must_touch, plans

import lazycell

MODES = {"PyNative": ms.PYNATIVE_MODE, "Graph": ms.GRAPH_MODE}
OWNERS = (ms, nn, ops, ops.functional, nn.Cell, nn.Optimizer, optim.Optimizer, Parameter, Tensor, nn.Dense, nn.Adam)
quiet = pytest.mark.filterwarnings("ignore::lazycell.UnusedLayerWarning")


def attributes() -> dict[tuple[Any, str], Any]:
    """Every attribute that the patch may touch, itself rather than a copy."""
    counter = "total_instance_count"  # of all cells; MindSpore's own
    return {(o, name): value for o in OWNERS for name, value in vars(o).items() if name != counter}


def changes(before: dict[tuple[Any, str], Any]) -> list[tuple[Any, str]]:
    """What isn't the very object it was; MindSpore's own modules gain names as they are used."""
    now = attributes()
    gained = [key for key in now.keys() - before.keys() if "lazycell" in repr(now[key])]
    return gained + [key for key, value in before.items() if now.get(key, changes) is not value]


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """Every test leaves MindSpore as it was."""
    before = attributes()
    yield
    lazycell.unpatch()
    assert not changes(before) and not lazycell.is_patched()


@pytest.fixture
def patched() -> Iterator[lazycell.PatchHandle]:
    """Under the patch."""
    with lazycell.patch() as handle:
        yield handle


def values(net: nn.Cell) -> dict[str, Any]:
    """All values by name; materializes."""
    lazycell.materialize(net)
    return {p.name: bits(p) for p in net.get_parameters()}


# ---------------------------------------------------------------------------------------------
# Unmodified scripts


def adam(parameters: Any) -> Any:
    return nn.Adam(parameters, 1e-2, weight_decay=1e-3)


class TestTheUsualLoop:
    """Net, Adam over ``trainable_params()``, ``value_and_grad``, 20 steps."""

    @quiet
    @pytest.mark.parametrize("mode", MODES)
    def test_equals_the_hand_pruned_net(self, mode: str) -> None:
        """It learns, dead layers have no moments, and the weights are the same bits."""
        seed()
        pruned = Pruned(Net())
        ms.set_context(mode=MODES[mode])
        expected = scripts.usual_loop(pruned, adam(pruned.trainable_params()))
        with lazycell.patch():
            seed()
            net = Net()
            optimizer = adam(net.trainable_params())
            losses = scripts.usual_loop(net, optimizer)
            live = names(net.trainable_params())
        assert losses == expected and losses[-1] < losses[0]
        assert deferred(net) == DEAD
        assert names(optimizer.parameters) == live == names(pruned.trainable_params())
        held = names(optimizer.get_parameters())
        assert {"moment1.stem.weight", "stem.weight", "global_step"} <= set(held)
        assert not [name for name in held if any(name.endswith(dead) for dead in DEAD)]
        for one, other in zip(pruned.trainable_params(), optimizer.parameters, strict=True):
            assert bits(one) == bits(other), one.name

    @pytest.mark.parametrize("mode", MODES)
    def test_warns_once_of_what_is_unused(self, mode: str, patched: object) -> None:
        """With the names, at the user's line."""
        ms.set_context(mode=MODES[mode])
        net = Net()
        with pytest.warns(lazycell.UnusedLayerWarning, match="2 layers of Net") as caught:
            scripts.usual_loop(net, adam(net.trainable_params()), steps=2)
        assert len(caught) == 1 and caught[0].filename == scripts.__file__
        assert [layer.name for layer in caught[0].message.layers] == ["dead", "blocks.1"]


@quiet
@pytest.mark.parametrize("loop", scripts.LOOPS, ids=lambda loop: loop.__name__)
@pytest.mark.parametrize("mode", MODES)
def test_every_way_to_train_gives_the_same_numbers(mode: str, loop: Callable[..., list[float]]) -> None:
    """Losses and all weights, dead ones included, are those without the patch, bit for bit."""
    ms.set_context(mode=MODES[mode])

    def script() -> tuple[nn.Cell, Any, list[float]]:
        seed()
        net = Net()
        optimizer = nn.Momentum(net.trainable_params(), 0.1, 0.9)
        return net, optimizer, loop(net, optimizer)

    eager, _, expected = script()
    with lazycell.patch():
        net, optimizer, losses = script()
    # A tuple of all parameters that a cell or a graph holds takes all of them in. So does a function that is compiled
    # with an optimizer that nothing has run before.
    imprecise = loop in (scripts.own_step_cell, scripts.jitted)
    imprecise |= loop is scripts.tuple_of_parameters and mode == "Graph"
    assert deferred(net) == (set() if imprecise else DEAD)
    assert len(optimizer.parameters.counted()) == (12 if imprecise else 8)
    assert losses == expected
    assert values(net) == values(eager)


@quiet
@pytest.mark.parametrize("mode", MODES)
def test_parameters_that_a_script_filters_first(mode: str, patched: object) -> None:
    """Groups by name, ordered, with a schedule: the optimizer holds what of them is touched."""
    ms.set_context(mode=MODES[mode])
    net = Net()
    decayed = list(filter(lambda p: p.ndim > 1, net.trainable_params()))
    others = [p for p in net.trainable_params() if p.ndim < 2]
    assert len(net.trainable_params()) == len(decayed) + len(others) == 12
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others}, {"order_params": net.trainable_params()}]
    optimizer = nn.AdamWeightDecay(groups, learning_rate=nn.CosineDecayLR(0.0, 0.1, 10))
    losses = scripts.usual_loop(net, optimizer, steps=5)
    assert losses[-1] < losses[0]
    assert set(names(optimizer.parameters)) == set(names(net.trainable_params())) and len(optimizer.parameters) == 12
    assert deferred(net) == DEAD and not [p for p in optimizer.get_parameters() if p.name.endswith(tuple(DEAD))]


@quiet
def test_lists_show_everything_until_something_is_used(patched: object) -> None:
    """A script may slice, add, count and freeze what it lists, as with MindSpore."""
    first, second = Net(), Net()
    second.update_parameters_name("second.")
    live = first.trainable_params()
    assert len(live) == 12 and live[0].name == "stem.weight" and len(live[2:]) == 10 and live
    assert len(live + second.trainable_params()) == 24 and is_deferred(live[-1])
    for parameter in first.trainable_params()[:4]:
        parameter.requires_grad = False
    assert len(first.trainable_params()) == 8
    first(ones(1, 6))
    assert names(live) == names(first.trainable_params()) and len(live) == 8
    assert deferred(first) == DEAD


@quiet
@pytest.mark.parametrize("make", [optim.Adam, optim.SGD], ids=lambda make: make.__name__)
def test_optimizers_of_experimental_optim(make: Any, patched: object) -> None:
    """Groups and a scheduler, built before anything ran, do what MindSpore's do."""

    def script() -> tuple[nn.Cell, list[float], list[float]]:
        seed()
        net = Net()
        weights = [p for p in net.trainable_params() if p.ndim > 1]
        others = [p for p in net.trainable_params() if p.ndim < 2]
        optimizer = make([{"params": weights, "lr": 0.05}, {"params": others}], lr=0.1)
        scheduler = optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        losses = []
        for _ in range(3):
            losses += scripts.usual_loop(net, optimizer, steps=1)
            scheduler.step()
        return net, losses, [float(rate) for rate in scheduler.get_last_lr()]

    net, losses, rates = script()
    assert deferred(net) == DEAD
    lazycell.unpatch()
    eager, expected, expected_rates = script()
    assert (losses, rates) == (expected, expected_rates)
    assert values(net) == values(eager)


def test_optimizers_of_mint_wait_as_well(patched: object) -> None:
    """They can be built over a net that has not run; on CPU there are no kernels to run some of them."""
    net = Net()
    optimizer = mint.optim.AdamW(net.trainable_params(), lr=0.1)
    assert isinstance(optimizer, mint.optim.AdamW) and isinstance(optimizer, lazycell.LazyOptimizer)
    assert [group["lr"] for group in optimizer.param_groups] == [optimizer.lrs[0]] and not touched(net)


class TestOptimizers:
    """What stands in for them."""

    def test_look_like_what_was_asked_for(self, patched: object) -> None:
        """Class, name, module, signature."""
        net = Net()
        optimizer = nn.Adam(params=net.trainable_params(), learning_rate=0.1)
        assert isinstance(optimizer, nn.Adam) and isinstance(optimizer, nn.Optimizer)
        assert (type(optimizer).__name__, type(optimizer).__module__) == ("Adam", nn.Adam.__module__)
        assert names(optimizer.parameters) == names(net.trainable_params())
        assert list(optimizer.get_parameters()) == []

    def test_of_the_users_own(self, patched: object) -> None:
        """One that takes parameters first waits; one that takes something else is MindSpore's, over all parameters."""

        class Waiting(nn.Momentum):
            def __init__(self, params: Any, rate: float) -> None:
                super().__init__(params, rate, 0.9)

        class OfNet(nn.Momentum):
            def __init__(self, net: nn.Cell) -> None:
                super().__init__(net.trainable_params(), 0.1, 0.9)

        net = Net()
        assert isinstance(Waiting(net.trainable_params(), 0.1), lazycell.LazyOptimizer)
        with pytest.warns(lazycell.LazyCellWarning, match="OfNet.*takes its parameters in a way of its own"):
            optimizer = OfNet(net)
        assert not isinstance(optimizer, lazycell.LazyOptimizer) and len(optimizer.parameters) == 12
        assert not {p.name for p in net.trainable_params() if is_deferred(p)}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            losses = scripts.usual_loop(net, optimizer, steps=3)
        assert losses[-1] < losses[0] and len(optimizer.parameters) == 12

    def test_mistakes_are_mindspores(self, patched: object) -> None:
        """What MindSpore refuses is refused."""
        with pytest.raises(TypeError):
            nn.Adam()
        with pytest.raises((TypeError, lazycell.LazyCellError)):
            nn.Adam([])
        for mistake, error in (({"beta1": 2.0}, ValueError), ({"learning_rate": "x"}, ValueError)):
            with pytest.raises(error):
                nn.Adam(Net().trainable_params(), **mistake)
        lazycell.unpatch()
        lazycell.patch()  # what an exception has left half built is no hindrance

    @quiet
    def test_a_lazy_one_of_the_users_is_left_alone(self, patched: object) -> None:
        """`LazyOptimizer` works as without the patch."""
        net = Net()
        optimizer = lazycell.LazyOptimizer(nn.Adam, net.trainable_params(), 0.1)
        assert type(optimizer).__name__ == "LazyOptimizer"
        scripts.usual_loop(net, optimizer, steps=2)
        assert len(optimizer.parameters) == 8

    @quiet
    def test_inside_a_constructor(self, patched: object) -> None:
        """An optimizer that a cell builds in its own ``__init__`` holds real state."""

        class Trainer(nn.Cell):
            def __init__(self) -> None:
                super().__init__()
                self.net = Net()
                self.net(ones(1, 6))
                self.optimizer = nn.Adam(self.net.trainable_params(), 0.1)
                assert len(list(self.optimizer.get_parameters())) > 8  # it is born here

        trainer = Trainer()
        assert not [p.name for p in trainer.optimizer.get_parameters() if is_deferred(p)]
        losses = scripts.usual_loop(trainer.net, trainer.optimizer, steps=3)
        assert losses[-1] < losses[0]


class TestGradients:
    """``mindspore.grad`` and ``value_and_grad``."""

    def test_wherever_mindspore_has_them(self, patched: object) -> None:
        """In every module."""
        for name in ("grad", "value_and_grad"):
            assert len({getattr(module, name) for module in (ms, ops, ops.functional, ops.function)}) == 1

    @quiet
    def test_frozen_weights_give_zeros_as_without_the_patch(self, patched: object) -> None:
        """lazycell's own functions refuse them; scripts may count on MindSpore's behaviour."""
        net = Net()
        net.stem.weight.requires_grad = False
        net(ones(1, 6))
        grads = ms.grad(scripts.loss_of(net), None, [net.stem.weight, net.head.weight], has_aux=True)
        weight, head = grads(Tensor(scripts.X), Tensor(scripts.Y))[0]
        assert not weight.asnumpy().any() and head.asnumpy().any()

    @quiet
    def test_with_respect_to_inputs(self, patched: object) -> None:
        """Nothing of lazycell's takes part."""
        net = Net()
        x = Tensor(scripts.X)
        assert ms.grad(lambda x: net(x).sum())(x).shape == x.shape
        value, (gradient, weights) = ms.value_and_grad(lambda x: net(x).sum(), 0, net.trainable_params())(x)
        assert gradient.shape == x.shape and len(weights) == 8

    def test_mistakes_are_mindspores(self, patched: object) -> None:
        """The same errors come out."""
        for mistake in ({}, {"nonsense": 1}, {"fn": abs, "grad_position": None, "weights": None},
                        {"fn": abs, "grad_position": "one"}, {"fn": abs, "weights": [3]}):  # fmt: skip
            errors = []
            for function in (ms.value_and_grad, ms.value_and_grad.__wrapped__):
                with pytest.raises(Exception) as raised:
                    function(**mistake)(ones(1))
                errors.append(type(raised.value))
            assert errors[0] is errors[1], mistake

    @pytest.mark.parametrize("mode", MODES)
    def test_made_inside_a_graph(self, mode: str, patched: object) -> None:
        """MindSpore's compiler finds its own function."""
        ms.set_context(mode=MODES[mode])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", lazycell.UnusedLayerWarning)
            net = Net()
            net(Tensor(scripts.X))
            assert scripts.GradientInside(net)(Tensor(scripts.X)).shape == scripts.X.shape

    def test_kept_from_the_patch(self) -> None:
        """A name that was imported under the patch does what MindSpore's does afterwards."""
        with lazycell.patch():
            kept, construct = ms.value_and_grad, nn.Cell.trainable_params
        net = Net()
        assert type(construct(net)) is list
        grad_fn = kept(scripts.loss_of(net), None, net.trainable_params(), has_aux=True)
        _, grads = grad_fn(Tensor(scripts.X), Tensor(scripts.Y))
        assert type(grads) is tuple and len(grads) == 12


# ---------------------------------------------------------------------------------------------
# What a script has seen listed doesn't change


class Wide(nn.Cell):
    """All layers have the same shape, so that a list that is off by one goes unnoticed; the middle one is dead."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.dead, self.last = nn.Dense(2, 2), nn.Dense(2, 2), nn.Dense(2, 2)

    def construct(self, x: Tensor) -> Tensor:
        return self.last(self.first(x))


def wide_loss(net: nn.Cell) -> Callable[[Tensor], Tensor]:
    """A loss over it."""

    def loss(x: Tensor) -> Tensor:
        return (net(x) ** 2).sum()

    return loss


def momentum_by_hand(net: nn.Cell) -> None:
    """Velocities made before anything ran, as scripts without an optimizer have them."""
    weights = net.trainable_params()
    velocities = [ops.zeros_like(p) for p in weights]
    grad_fn = ms.value_and_grad(wide_loss(net), None, weights)
    for _ in range(3):
        _, grads = grad_fn(ones(1, 2))
        velocities = [0.9 * v + g for v, g in zip(velocities, grads)]
        for p, v in zip(net.trainable_params(), velocities):
            ops.assign_sub(p, 0.01 * v)


def averaged_copy(net: nn.Cell) -> None:
    """An average of weights, kept by a copy that never runs."""
    average = copy.deepcopy(net)
    optimizer = nn.SGD(net.trainable_params(), 0.1)
    grad_fn = ms.value_and_grad(wide_loss(net), None, optimizer.parameters)
    for _ in range(3):
        optimizer(grad_fn(ones(1, 2))[1])
        for p, kept in zip(net.trainable_params(), average.trainable_params()):
            ops.assign(kept, 0.9 * kept + 0.1 * p)
    net.average = average


def accumulated(net: nn.Cell) -> None:
    """MindSpore's own recipe for accumulating gradients."""
    optimizer = nn.SGD(net.trainable_params(), 0.1)
    sums = optimizer.parameters.clone(prefix="sum", init="zeros")
    grad_fn = ms.value_and_grad(wide_loss(net), None, optimizer.parameters)
    for _ in range(2):
        for kept, gradient in zip(sums, grad_fn(ones(1, 2))[1]):
            ops.assign_add(kept, gradient)
    optimizer(tuple(kept / 2 for kept in sums))


def two_lists_extended(net: nn.Cell) -> None:
    """Lists that are edited: the parameters of another net, and one taken out."""
    other = Wide()
    other.update_parameters_name("other.")
    weights = net.trainable_params()
    weights.extend(other.trainable_params())
    weights += [Parameter(ones(2), name="scale")]
    del weights[0]
    optimizer = nn.SGD(weights, 0.1)

    def loss(x: Tensor) -> Tensor:
        return ((net(x) + other(x)) ** 2).sum() + (weights[-1] ** 2).sum()

    grad_fn = ms.value_and_grad(loss, None, weights)
    for _ in range(3):
        optimizer(grad_fn(ones(1, 2))[1])
    net.other, net.scale = other, weights[-1]


def toggled(net: nn.Cell) -> None:
    """Frozen while it runs, and trained afterwards, as a discriminator is."""
    optimizer = nn.SGD(net.trainable_params(), 0.1)
    for parameter in net.trainable_params():
        parameter.requires_grad = False
    net(ones(1, 2))
    for parameter in net.get_parameters():
        parameter.requires_grad = True
    grad_fn = ms.value_and_grad(wide_loss(net), None, optimizer.parameters)
    for _ in range(3):
        optimizer(grad_fn(ones(1, 2))[1])


def frozen_when_built(net: nn.Cell) -> None:
    """An optimizer holds what required a gradient when it was built."""
    net.first.weight.requires_grad = False
    optimizer = nn.Momentum(net.trainable_params(), 0.1, 0.9)
    net.first.weight.requires_grad = True
    grad_fn = ms.value_and_grad(wide_loss(net), None, optimizer.parameters)
    for _ in range(3):
        optimizer(grad_fn(ones(1, 2))[1])


def resting(net: nn.Cell) -> None:
    """What rests in a step goes on with its momentum, as MindSpore has it."""
    optimizer = nn.Momentum(net.trainable_params(), 0.1, 0.9)

    def half(x: Tensor) -> Tensor:
        return (net.first(x) ** 2).sum()

    for loss in (wide_loss(net), half, wide_loss(net), half):
        optimizer(ms.value_and_grad(loss, None, optimizer.parameters)(ones(1, 2))[1])


def rate_before_the_first_step(net: nn.Cell) -> None:
    """What an optimizer is asked, and told, before anything has run."""
    optimizer = nn.Momentum(net.trainable_params(), 0.1, 0.9)
    assert float(optimizer.get_lr().asnumpy()) == pytest.approx(0.1) and not optimizer.is_group
    optimizer.learning_rate.set_data(Tensor(0.05, ms.float32))
    grad_fn = ms.value_and_grad(wide_loss(net), None, optimizer.parameters)
    for _ in range(3):
        optimizer(grad_fn(ones(1, 2))[1])
    assert int(optimizer.global_step.asnumpy()[0]) == 3


def synchronized(net: nn.Cell) -> None:
    """A target net that takes over values before either has run."""
    target = Wide()
    for p, kept in zip(net.get_parameters(), target.get_parameters()):
        kept.set_data(p)
    target(net(ones(1, 2)))
    net.target = target


SCRIPTS = (momentum_by_hand, averaged_copy, accumulated, two_lists_extended, toggled, frozen_when_built, resting,
           rate_before_the_first_step, synchronized)  # fmt: skip


@pytest.mark.filterwarnings("ignore::lazycell.LazyCellWarning")
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_scripts_that_pair_copy_edit_and_ask(script: Callable[[nn.Cell], None]) -> None:
    """They change the same weights by the same numbers, dead layers or not."""
    found = []
    for patched in (False, True):
        seed()
        if patched:
            lazycell.patch()
        net = Wide()
        script(net)
        found.append(values(net))
        lazycell.unpatch()
    assert found[0] == found[1]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("loop", scripts.LOOPS, ids=lambda loop: loop.__name__)
@pytest.mark.parametrize("how", ["list", "filtered"])
def test_dead_layers_are_named_however_they_came_to_be_held(
    mode: str, loop: Callable[..., list[float]], how: str, patched: object
) -> None:
    """What is allocated because it can't be told apart wasn't called for that: warning and report say so."""
    ms.set_context(mode=MODES[mode])
    net = Net()
    weights = net.trainable_params()
    optimizer = nn.Momentum([p for p in weights if p.requires_grad] if how == "filtered" else weights, 0.1, 0.9)
    if loop is scripts.own_step_cell and mode == "PyNative":
        pytest.skip("a cell that keeps a tuple of parameters may read any of them")
    with pytest.warns(lazycell.UnusedLayerWarning, match="defined and never invoked") as caught:
        loop(net, optimizer)
    named = [layer.name.rpartition("_backbone.")[2] for layer in caught[0].message.layers]
    # A compiler that takes one layer out of a CellList resolves all of them.
    in_graph = mode == "Graph" or loop is scripts.jitted
    assert named == (["dead"] if in_graph and deferred(net) != DEAD else ["dead", "blocks.1"])
    assert lazycell.registry(net).untouched == tuple(named)


@quiet
def test_optimizers_hold_moments_for_what_is_used_alone(patched: object) -> None:
    """Whatever a list shows, and however it was asked for."""
    net = Net()
    weights = [p for p in net.trainable_params()]
    optimizer = nn.Adam(weights, 0.1)
    assert len(optimizer.parameters) == 12
    grad_fn = ms.value_and_grad(scripts.loss_of(net), None, weights, has_aux=True)
    _, grads = grad_fn(Tensor(scripts.X), Tensor(scripts.Y))
    assert len(grads) == 12
    optimizer(grads)
    assert deferred(net) == DEAD and len(optimizer.moment1) == 8


def test_lists_taken_after_an_incomplete_pass(patched: object) -> None:
    """A script that lists parameters after an evaluation is told when others come to be used."""

    class Headed(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Dense(2, 2), nn.Dense(2, 2)

        def construct(self, x: Tensor) -> Tensor:
            return self.head(self.body(x)) if self.training else self.body(x)

    net = Headed()
    with pytest.warns(lazycell.UnusedLayerWarning):
        net(ones(1, 2))
    assert [p.name for p in net.trainable_params()] == ["body.weight", "body.bias"]
    net.set_train()
    with pytest.warns(lazycell.LazyCellWarning, match=r"head.weight is used .* without it at .*test_patch.py:\d+"):
        net(ones(1, 2))


@pytest.mark.parametrize("whole", [True, False], ids=["training cell", "optimizer"])
@pytest.mark.parametrize("mode", MODES)
@quiet
def test_resuming_by_mindspores_own_functions(mode: str, whole: bool, tmp_path: Any) -> None:
    """State that is loaded before the first step is used; of dead layers none is made."""

    def script(stop: int, path: str | None) -> tuple[nn.Cell, Any, list[float]]:
        seed()
        net = Net()
        optimizer = nn.Adam(net.trainable_params(), 0.1)
        step = nn.TrainOneStepCell(nn.WithLossCell(net, nn.MSELoss()), optimizer)
        if path is not None:
            saved = ms.load_checkpoint(path)
            for target in (step,) if whole else (net, optimizer):
                ms.load_param_into_net(target, saved)
        losses = [float(step(Tensor(scripts.X), Tensor(scripts.Y)).asnumpy()) for _ in range(stop)]
        return step, optimizer, losses

    ms.set_context(mode=MODES[mode])
    path = str(tmp_path / "saved.ckpt")
    expected = script(6, None)[2]
    with lazycell.patch():
        step, optimizer, losses = script(3, None)
        held = {p.name: p for p in (*step.network.get_parameters(), *optimizer.get_parameters())}
        ms.save_checkpoint([{"name": name, "data": p} for name, p in held.items() if not is_deferred(p)], path)
        step, optimizer, more = script(3, path)
        assert losses + more == expected
        assert deferred(step.network) == {"_backbone." + name for name in DEAD} or deferred(step.network) == DEAD


class TestGraphsThatLookAtGradients:
    """A training cell that indexes or clips them is compiled before anything has run."""

    @quiet
    def test_equals_the_eager_one(self) -> None:
        """The same losses and weights; dead layers stay without storage."""
        ms.set_context(mode=ms.GRAPH_MODE)
        found = []
        for patched in (False, True):
            seed()
            if patched:
                lazycell.patch()
            net = Net()
            optimizer = nn.Momentum(net.trainable_params(), 0.1, 0.9)
            step = scripts.ClippedStep(nn.WithLossCell(net, nn.MSELoss()), optimizer)
            losses = [float(step(Tensor(scripts.X), Tensor(scripts.Y)).asnumpy()) for _ in range(3)]
            if patched:
                assert deferred(net) == DEAD
            lazycell.unpatch()
            found.append((losses, values(net)))
        assert found[0] == found[1]

    @quiet
    def test_one_that_fails_leaves_nothing(self) -> None:
        """A later compilation, of something else, knows nothing of it; also without the patch."""
        ms.set_context(mode=ms.GRAPH_MODE)
        shared = nn.MSELoss()

        def step(width: int) -> Tensor:
            net = Net()
            cell = nn.TrainOneStepCell(nn.WithLossCell(net, shared), nn.Momentum(net.trainable_params(), 0.1, 0.9))
            return cell(ones(2, width), ones(2, 2))

        with lazycell.patch():
            with pytest.raises(Exception, match="MatMul|matmul"):
                step(3)
            assert step(6).shape == ()
        assert step(6).shape == ()


def test_classes_equal_what_they_stand_for(patched: object) -> None:
    """Comparing, looking up and choosing by class work as with MindSpore; only ``is`` tells them apart."""
    cell = nn.Dense(2, 2)
    assert type(cell) == nn.Dense and nn.Dense == type(cell) and type(cell) in (nn.Conv2d, nn.Dense)  # noqa: E721
    assert type(cell) != nn.Conv2d and {nn.Dense: "found"}[type(cell)] == "found"  # noqa: E721
    assert hash(type(cell)) == hash(nn.Dense) and type(cell) is not nn.Dense
    assert len({type(cell), nn.Dense, type(nn.Dense(2, 2))}) == 1


# ---------------------------------------------------------------------------------------------
# Laws


def train(plan: Block) -> tuple[nn.Cell, dict[str, Any], list[Any]]:
    """An unmodified script over a random net."""
    seed()
    net = build(plan, nn.Cell)
    after_construction = stream()
    optimizer = nn.Momentum(net.trainable_params(), 0.1, 0.9)

    def loss(x: Tensor) -> Tensor:
        return net(x).sum()

    grad_fn = ms.value_and_grad(loss, None, optimizer.parameters)
    seen: list[Any] = [after_construction]
    for _ in range(2):
        value, grads = grad_fn(inputs())
        optimizer(grads)
        seen.append((bits(value), {p.name: bits(g) for p, g in zip(optimizer.parameters, grads)}))
    return net, {p.name: p for p in net.get_parameters()}, seen


@quiet
@pytest.mark.parametrize("mode", MODES)
def test_laws_hold_for_plain_cells(mode: str) -> None:
    """Same values, same training, the touched set of the oracle, and streams as without the patch."""
    examples = settings.default.max_examples

    @settings(max_examples=examples if mode == "PyNative" else max(examples // 5, 3))
    @given(plans())
    def check(plan: Block) -> None:
        ms.set_context(mode=MODES[mode])
        seed()
        example = build(plan, nn.Cell)
        used = {p.name for p in example.get_parameters() if id(p) in must_touch(example, plan)}
        if not any(p.requires_grad for p in example.get_parameters() if p.name in used):
            return
        _, expected, eager = train(plan)
        with lazycell.patch():
            net, found, seen = train(plan)
            live = names(net.trainable_params())
        assert touched(net) == used
        assert live == [name for name, p in expected.items() if name in used and p.requires_grad]
        assert seen[0] == eager[0]
        for (value, grads), (eager_value, eager_grads) in zip(seen[1:], eager[1:], strict=True):
            assert value == eager_value
            assert grads == {name: eager_grads[name] for name in live}
        lazycell.materialize(net)
        assert {name: bits(p) for name, p in found.items()} == {name: bits(p) for name, p in expected.items()}

    check()


# ---------------------------------------------------------------------------------------------
# Undoing


class TestUndoing:
    """L8."""

    def test_handles_in_any_order(self) -> None:
        """The patch is gone with the last of them; each may be removed twice."""
        one, two, three = lazycell.patch(), lazycell.patch(), lazycell.patch()
        inside = attributes()
        two.remove()
        two.remove()
        one.remove()
        assert lazycell.is_patched() and not changes(inside)
        three.remove()
        assert not lazycell.is_patched()

    def test_unpatch_ends_all(self) -> None:
        """Whoever patched, and how often; what is removed later does no harm."""
        handle = lazycell.patch()
        with lazycell.patch():
            lazycell.unpatch()
            assert not lazycell.is_patched()
            with lazycell.patch():
                handle.remove()
                assert lazycell.is_patched()
        lazycell.unpatch()

    def test_after_an_exception(self) -> None:
        """Also one in the middle of a constructor, or of a forward pass."""

        class Broken(nn.Cell):
            def __init__(self) -> None:
                super().__init__()
                self.fc = nn.Dense(2, 2)
                raise ValueError("in __init__")

        with pytest.raises(ValueError, match="in __init__"), lazycell.patch():
            Broken()
        assert "__init__" in vars(Broken) and not hasattr(Broken.__init__, "__wrapped__")
        with pytest.raises(TypeError), lazycell.patch():
            Net()(3)

    def test_classes_of_the_user(self) -> None:
        """Their constructors are the very functions they were, own or inherited."""

        class Base(nn.Cell):
            def __init__(self, width: int) -> None:
                super().__init__()
                self.fc = nn.Dense(width, width)

        class Derived(Base):
            pass

        own = Base.__init__
        with lazycell.patch():
            assert is_deferred(Derived(3).fc.weight) and is_deferred(Base(3).fc.weight)
        assert Base.__init__ is own and "__init__" not in vars(Derived)
        assert not is_deferred(Derived(3).fc.weight)

    def test_what_someone_else_put_there_is_left(self) -> None:
        """With a warning; the next patch works."""
        handle = lazycell.patch()
        mine = nn.Cell.trainable_params
        try:
            theirs = functools.wraps(mine)(lambda self, recurse=True: mine(self, recurse))
            nn.Cell.trainable_params = theirs
            with pytest.warns(lazycell.LazyCellWarning, match="something else has replaced"):
                handle.remove()
            assert nn.Cell.trainable_params is theirs
            assert type(Net().trainable_params()) is list
            with lazycell.patch():
                assert type(Net().trainable_params()) is lazycell.TouchedParameters
        finally:
            nn.Cell.trainable_params = mine.__wrapped__

    def test_the_rest_is_put_back_all_the_same(self) -> None:
        """Also if the warning is made an error."""
        native = vars(nn.Cell)["__new__"]
        handle, mine = lazycell.patch(), nn.Cell.__new__
        try:
            nn.Cell.__new__ = staticmethod(lambda *args, **kwargs: mine(*args, **kwargs))
            with pytest.raises(lazycell.LazyCellWarning):  # filterwarnings = error
                handle.remove()
        finally:
            nn.Cell.__new__ = native

    def test_nets_stay_what_they_are(self) -> None:
        """A net built under the patch is lazy afterwards, too, and its values are still to come."""
        seed()
        eager = values(Net())
        with lazycell.patch():
            seed()
            net = Net()
        assert deferred(net) == {p.name for p in net.get_parameters()}
        with pytest.warns(lazycell.UnusedLayerWarning):
            net(ones(1, 6))
        assert deferred(net) == DEAD and values(net) == eager

    def test_nothing_is_kept_alive(self) -> None:
        """Neither nets nor classes."""
        import weakref

        with lazycell.patch():

            class Own(nn.Cell):
                def __init__(self) -> None:
                    super().__init__()
                    self.fc = nn.Dense(2, 2)

                def construct(self, x: Tensor) -> Tensor:
                    return self.fc(x)

            net = Own()
            assert len([p for p in net.trainable_params()]) == 2  # going through a list doesn't keep it
            optimizer = nn.Adam(net.trainable_params())
            net(ones(1, 2))
            known = weakref.ref(net)
            del net, optimizer
            gc.collect()
            assert known() is None

    def test_threads(self) -> None:
        """Many threads that patch and build at the same time leave nothing, and each gets what it asked for."""
        failures: list[str] = []

        def work() -> None:
            for _ in range(20):
                with lazycell.patch():
                    cell = nn.Dense(3, 2)
                    if not is_deferred(cell.weight):
                        failures.append("not deferred")

        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures and not lazycell.is_patched()


class TestCellsFromBefore:
    """They are adopted when they are first called."""

    def test_adopted(self) -> None:
        """By a call, or by asking for their parameters; their values stay."""
        net, other = Net(), Net()
        before = bits(net.stem.weight)
        with lazycell.patch():
            assert len(other.trainable_params()) == 12 and type(other.trainable_params()) is lazycell.TouchedParameters
            with pytest.warns(lazycell.UnusedLayerWarning, match="2 layers of Net"):
                net(ones(1, 6))
            assert touched(net) == {p.name for p in net.get_parameters()} - DEAD
            assert bits(net.stem.weight) == before
            assert lazycell.release(net) == sum(p.nbytes for p in net.get_parameters() if p.name in DEAD)

    def test_left_alone_if_never_called(self) -> None:
        """Their classes are what they were."""
        net = Net()
        with lazycell.patch():
            assert isinstance(net, Net)
        assert type(net) is Net and type(net.stem) is nn.Dense and not hasattr(net, "_lazycell_state")

    def test_called_before_and_after(self) -> None:
        """What has run counts as used."""
        net = Net()
        net(ones(1, 6))
        with lazycell.patch():
            with pytest.warns(lazycell.UnusedLayerWarning, match="2 layers of Net"):
                net(ones(1, 6))
            assert len(net.trainable_params()) == 8


class TestWarnings:
    """Nobody is warned of what MindSpore keeps for itself."""

    @pytest.mark.parametrize("mode", MODES)
    def test_wrappers_report_the_users_net_once(self, mode: str, patched: object) -> None:
        """However many wrappers it is in."""
        ms.set_context(mode=MODES[mode])
        net = Net()
        optimizer = nn.Momentum(net.trainable_params(), 0.1, 0.9)
        with pytest.warns(lazycell.LazyCellWarning) as caught:
            scripts.one_step_cell(net, optimizer, steps=2)
            nn.WithEvalCell(net, nn.MSELoss())(Tensor(scripts.X), Tensor(scripts.Y))
            net(Tensor(scripts.X))
        assert [str(entry.message).partition(" (")[0] for entry in caught] == [
            "2 layers of Net were defined and never invoked"
        ]

    def test_wrappers_of_the_users_own(self, patched: object) -> None:
        """What a base class of MindSpore's assigns and a derived one leaves out isn't the user's."""

        class Step(nn.TrainOneStepCell):
            def construct(self, x: Tensor, y: Tensor) -> Tensor:
                return self.network(x, y)

        class Whole(nn.Cell):
            def construct(self, x: Tensor, y: Tensor) -> Tensor:
                return x * y

        step = Step(Whole(), nn.Momentum([Parameter(ones(2), name="w")], 0.1, 0.9))
        step(ones(1), ones(1))  # filterwarnings = error

    def test_losses_and_metrics(self, patched: object) -> None:
        """They never warn."""
        x = ones(2, 3)
        for loss in (nn.MSELoss(), nn.L1Loss(), nn.CrossEntropyLoss(), nn.SoftmaxCrossEntropyWithLogits()):
            loss(x, x)
        nn.WithLossCell(nn.Dense(3, 3), nn.MSELoss())(x, x)


def test_copies_and_masks(patched: object) -> None:
    """Deep copies, class checks and names are as with plain cells."""
    net = Net()
    copied = copy.deepcopy(net)
    assert isinstance(net, Net) and type(net).__name__ == "Net" and repr(net) == repr(copied)
    assert deferred(copied) == deferred(net)
    with pytest.warns(lazycell.UnusedLayerWarning):
        copied(ones(1, 6))
    assert not touched(net) and len(touched(copied)) == 8
    assert np.array_equal(net.stem.weight.asnumpy(), copied.stem.weight.asnumpy())
