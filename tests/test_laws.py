"""The laws of DESIGN.md, on random nets, in PyNative mode."""

from __future__ import annotations

import copy
import tempfile
import warnings
from pathlib import Path

import mindspore as ms
import pytest
from helpers import assert_same_values, bits, both, deferred, names, touched
from hypothesis import given
from hypothesis import strategies as st
from mindspore import nn
from strategies import Block, build, inputs, must_touch, plans

import lazycell
from lazycell import _deferral, _tracking

pytestmark = pytest.mark.filterwarnings("ignore::lazycell.UnusedLayerWarning")


def twins(plan: Block) -> tuple[nn.Cell, nn.Cell]:
    """An eager and a lazy net of the same plan and seed."""
    return both(lambda base: build(plan, base, root=True))


def trainable(net: nn.Cell, used: set[int]) -> list[ms.Parameter]:
    """The parameters of an eager net that are trained if only the used ones are."""
    return [p for p in net.trainable_params() if id(p) in used]


@given(plans())
def test_l1_identity(plan: Block) -> None:
    """Materializing keeps the objects, and names are the eager ones, before and after."""
    eager, net = twins(plan)
    before = list(net.get_parameters())
    assert names(eager.get_parameters()) == names(before)
    eager(inputs())
    net(inputs())
    lazycell.materialize(net)
    assert [id(p) for p in before] == [id(p) for p in net.get_parameters()]
    assert names(eager.get_parameters()) == names(before)
    assert not deferred(net)


@given(plans(), st.randoms(use_true_random=False))
def test_l2_same_numbers(plan: Block, random: object) -> None:
    """Values don't depend on the order of materialization, nor on whether a layer ever runs."""
    eager, net = twins(plan)
    order = list(net.get_parameters())
    random.shuffle(order)
    for parameter in order[: len(order) // 2]:
        _deferral.materialize(parameter)
    before = copy.deepcopy(net)
    assert_same_values(eager, net)
    assert_same_values(eager, before)


@given(plans())
def test_l3_same_training(plan: Block) -> None:
    """Outputs, gradients and updated weights are those of the eager net, bit for bit."""
    eager, net = twins(plan)
    used = must_touch(eager, plan)
    weights = trainable(eager, used)
    live = net.trainable_params()  # before anything has run
    if not weights:
        assert bits(eager(inputs())) == bits(net(inputs()))
        return
    eager_step = ms.value_and_grad(lambda x: eager(x).sum(), None, weights)
    step = ms.value_and_grad(lambda x: net(x).sum(), None, live)
    for _ in range(2):
        value, gradients = eager_step(inputs())
        lazy_value, lazy_gradients = step(inputs())
        assert bits(value) == bits(lazy_value)
        assert names(weights) == names(net.trainable_params())
        for one, other in zip(gradients, lazy_gradients, strict=True):
            assert bits(one) == bits(other)
        nn.Momentum(weights, 0.1, 0.9)(gradients)
        nn.Momentum(net.trainable_params(), 0.1, 0.9)(lazy_gradients)
    assert_same_values(eager, net)


@given(plans())
def test_l4_exact(plan: Block) -> None:
    """The touched set is the one that the plan says."""
    eager, net = twins(plan)
    used = must_touch(eager, plan)
    net(inputs())
    assert {p.name for p in eager.get_parameters() if id(p) in used} == touched(net)


@given(plans())
def test_l5_order(plan: Block) -> None:
    """The live list is the eager list, filtered; one made before the first forward is as good as one made after."""
    eager, net = twins(plan)
    live = net.trainable_params()
    assert len(live) == 0
    used = must_touch(eager, plan)
    net(inputs())
    assert names(trainable(eager, used)) == names(live) == names(net.trainable_params())
    assert [id(p) for p in live] == [id(p) for p in net.trainable_params()]


@given(plans())
def test_l6_dead_stays_dead(plan: Block) -> None:
    """Nothing but a use, a load or a read of values allocates."""
    eager, net = twins(plan)
    used = must_touch(eager, plan)
    dead = {p.name for p in net.get_parameters()} - {p.name for p in eager.get_parameters() if id(p) in used}
    dead &= deferred(net)  # a constructor may have needed values itself
    live = net.trainable_params()
    ms.value_and_grad(lambda x: net(x).sum(), 0, live)(inputs())
    if live:
        nn.Adam(net.trainable_params(), 0.1)(tuple(p * 1 for p in live))
    for action in (str, repr, lambda n: [p.shape for p in n.get_parameters()], lambda n: n.parameters_dict()):
        action(net)
    str(lazycell.registry(net))
    assert sum(p.size for p in net.get_parameters()) == lazycell.registry(net).num_parameters
    copied = copy.deepcopy(net)
    copied(inputs())
    with tempfile.TemporaryDirectory() as folder:
        ms.save_checkpoint([{"name": p.name, "data": p} for p in live], str(Path(folder) / "live.ckpt"))
    assert dead == deferred(net) == deferred(copied)


@given(plans())
def test_l7_transparent(plan: Block) -> None:
    """A lazy net looks like the plain one, before it ran, after it ran, and when copied."""
    eager, net = twins(plan)
    for _ in range(2):
        assert repr(eager).replace("PlainNet", "LazyNet") == repr(net).replace("PlainNet", "LazyNet")
        for one, other in zip(eager.cells_and_names(), net.cells_and_names(), strict=True):
            assert one[0] == other[0]
            assert isinstance(other[1], type(one[1])) or isinstance(other[1], lazycell.LazyCell)
            kinds = (type(one[1]), type(other[1]))
            if not isinstance(other[1], lazycell.LazyCell):
                assert len({(kind.__module__, kind.__name__, kind.__qualname__) for kind in kinds}) == 1
        net(inputs())
    copied = copy.deepcopy(net)
    assert touched(net) == touched(copied)
    assert names(net.trainable_params()) == names(copied.trainable_params())
    assert not {id(p) for p in net.get_parameters()} & {id(p) for p in copied.get_parameters()}


class Refusing(nn.Cell):
    """A cell whose class can't be replaced."""

    __slots__ = ("kept",)

    def __init__(self, plan: Block) -> None:
        super().__init__()
        self.inner = build(plan, nn.Cell)
        self.weight = ms.Parameter(ms.Tensor([1.0, 2.0]), name="weight")

    def construct(self, x: ms.Tensor) -> ms.Tensor:
        return self.inner(x)


@given(plans())
def test_l9_never_wrong(plan: Block) -> None:
    """What can't be watched is allocated and counts as touched; numbers stay right, and it is said."""

    def make(base: type[nn.Cell]) -> nn.Cell:
        class Net(base):
            def __init__(self) -> None:
                super().__init__()
                self.part = Refusing(plan)

            def construct(self, x: ms.Tensor) -> ms.Tensor:
                return self.part(x)

        return Net()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", lazycell.LazyCellWarning)
        eager, net = both(make)
    assert ["Refusing can't be watched"] == [str(entry.message)[:25] for entry in caught]
    assert not _deferral.is_deferred(net.part.weight)
    assert _tracking.is_touched(net.part.weight)
    assert bits(eager(inputs())) == bits(net(inputs()))
    assert_same_values(eager, net)


@given(plans(), plans())
def test_l10_settled_classes(plan: Block, other: Block) -> None:
    """Every cell that was called has its own class back; nothing of lazycell runs in its calls any more."""
    _, net = twins(plan)
    net(inputs())
    for cell in net.cells():
        state = _tracking.state_of(cell)
        assert state.called != _tracking.is_watched(cell)
    assert type(net).__dict__.get("__call__") is None
