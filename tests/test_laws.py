"""The laws that lazycell keeps, on random nets, in both modes."""

from __future__ import annotations

import copy
import functools
import re
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from random import Random

import mindspore as ms
import pytest
from helpers import assert_same_values, bits, both, deferred, names, touched
from hypothesis import given, settings
from hypothesis import strategies as st
from mindspore import nn
from strategies import Block, build, inputs, must_touch, plans

import lazycell
from lazycell import _deferral, _touching, _tracking, _unsized, layers

pytestmark = pytest.mark.filterwarnings("ignore::lazycell.UnusedLayerWarning")


MODES = {"PyNative": ms.PYNATIVE_MODE, "Graph": ms.GRAPH_MODE}


def in_both_modes(law: Callable[..., None]) -> Callable[..., None]:
    """A test of a law in each mode; compiling is slow, so Graph mode gets fewer nets."""

    @pytest.mark.parametrize("mode", MODES)
    @functools.wraps(law)
    def test(mode: str) -> None:
        examples = settings.default.max_examples

        @settings(max_examples=examples if mode == "PyNative" else max(examples // 5, 3))
        @given(plans(), st.randoms(use_true_random=False))
        def check(plan: Block, random: Random) -> None:
            ms.set_context(mode=MODES[mode])
            eager, net = both(lambda base: build(plan, base, root=True))
            law(plan, eager, net, random)

        check()

    del test.__wrapped__  # pytest would look for the law's own arguments
    return test


def trainable(net: nn.Cell, used: set[int]) -> list[ms.Parameter]:
    """The parameters of an eager net that are trained if only the used ones are."""
    return [p for p in net.trainable_params() if id(p) in used]


def gradients_of(net: nn.Cell, weights: list[ms.Parameter]) -> Callable[[ms.Tensor], tuple]:
    """MindSpore's own gradient function."""

    def loss(x: ms.Tensor) -> ms.Tensor:
        return net(x).sum()

    return ms.value_and_grad(loss, None, weights)


@in_both_modes
def test_l1_identity(plan: Block, eager: nn.Cell, net: nn.Cell, random: Random) -> None:
    """Materializing keeps the objects, and names are the eager ones, before and after."""
    before = list(net.get_parameters())
    assert names(eager.get_parameters()) == names(before)
    eager(inputs())
    net(inputs())
    if any(map(_unsized.is_unsized, before)):
        with pytest.raises(lazycell.UntouchedError, match="gives the sizes of"):
            lazycell.materialize(net)
        assert_same_values(eager, net)
    lazycell.materialize(net)
    assert [id(p) for p in before] == [id(p) for p in net.get_parameters()]
    assert names(eager.get_parameters()) == names(before)
    assert not deferred(net)


@in_both_modes
def test_l2_same_numbers(plan: Block, eager: nn.Cell, net: nn.Cell, random: Random) -> None:
    """Values don't depend on the order of materialization, nor on whether a layer ever runs."""
    order = list(net.get_parameters())
    random.shuffle(order)
    for parameter in order[: len(order) // 2]:
        if not _unsized.is_unsized(parameter):
            _deferral.materialize(parameter)
    copied = copy.deepcopy(net)
    if random.random() < 0.5:
        net(inputs())
    assert_same_values(eager, net)
    assert_same_values(eager, copied)


@in_both_modes
def test_l3_same_training(plan: Block, eager: nn.Cell, net: nn.Cell, random: Random) -> None:
    """Outputs, gradients and updated weights are those of the eager net, bit for bit."""
    weights = trainable(eager, must_touch(eager, plan))
    live = net.trainable_params()  # before anything has run
    graph = ms.get_context("mode") == ms.GRAPH_MODE
    if graph or not weights:  # in Graph mode a live list must be filled when the graph is built
        assert bits(eager(inputs())) == bits(net(inputs()))
    if not weights:
        return
    eager_step, step = gradients_of(eager, weights), gradients_of(net, live)
    for _ in range(1 if graph else 2):
        value, gradients = eager_step(inputs())
        lazy_value, lazy_gradients = step(inputs())
        assert bits(value) == bits(lazy_value)
        assert names(weights) == names(net.trainable_params())
        for one, other in zip(gradients, lazy_gradients, strict=True):
            assert bits(one) == bits(other)
        nn.Momentum(weights, 0.1, 0.9)(gradients)
        nn.Momentum(net.trainable_params(), 0.1, 0.9)(lazy_gradients)
    assert_same_values(eager, net)


@in_both_modes
def test_l4_exact(plan: Block, eager: nn.Cell, net: nn.Cell, random: Random) -> None:
    """The touched set is the one that the plan says."""
    used = must_touch(eager, plan)
    net(inputs())
    assert {p.name for p in eager.get_parameters() if id(p) in used} == touched(net)


@in_both_modes
def test_l4_exact_in_a_function(plan: Block, eager: nn.Cell, net: nn.Cell, random: Random) -> None:
    """So it is when a jitted function calls the net, whose result is right from the first call on."""
    used = must_touch(eager, plan)

    @ms.jit
    def run(x: ms.Tensor) -> ms.Tensor:
        return net(x) * 1

    @ms.jit
    def run_eager(x: ms.Tensor) -> ms.Tensor:
        return eager(x) * 1

    assert bits(run(inputs())) == bits(run_eager(inputs()))
    assert {p.name for p in eager.get_parameters() if id(p) in used} == touched(net)


@in_both_modes
def test_l5_order(plan: Block, eager: nn.Cell, net: nn.Cell, random: Random) -> None:
    """The live list is the eager list, filtered; one made before the first forward is as good as one made after."""
    live = net.trainable_params()
    assert len(live) == 0
    used = must_touch(eager, plan)
    net(inputs())
    assert names(trainable(eager, used)) == names(live) == names(net.trainable_params())
    assert [id(p) for p in live] == [id(p) for p in net.trainable_params()]


@in_both_modes
def test_l6_dead_stays_dead(plan: Block, eager: nn.Cell, net: nn.Cell, random: Random) -> None:
    """Nothing but a use, a load or a read of values allocates."""
    used = must_touch(eager, plan)
    dead = {p.name for p in net.get_parameters()} - {p.name for p in eager.get_parameters() if id(p) in used}
    dead &= deferred(net)  # a constructor may have needed values itself
    live = net.trainable_params()
    net(inputs())
    if live:
        gradients_of(net, live)(inputs())
        nn.Adam(net.trainable_params(), 0.1)(tuple(p * 1 for p in live))
    shapes = functools.partial(map, lambda p: None if _unsized.is_unsized(p) else p.shape)
    for action in (str, repr, lambda n: list(shapes(n.get_parameters())), lambda n: n.parameters_dict()):
        action(net)
    str(lazycell.registry(net))
    assert sum(map(_unsized.num_elements, net.get_parameters())) == lazycell.registry(net).num_parameters
    copied = copy.deepcopy(net)
    copied(inputs())
    with tempfile.TemporaryDirectory() as folder:
        ms.save_checkpoint([{"name": p.name, "data": p} for p in live], str(Path(folder) / "live.ckpt"))
    assert dead == deferred(net) == deferred(copied)


def _as_it_looks(net: nn.Cell) -> str:
    """A net's ``repr``, without what waits for its size and what it is to become."""
    text = repr(net).replace("PlainNet", "LazyNet")
    return re.sub(r"(LazyDense|Dense|LazyBatchNorm1d|BatchNorm1d)\(.*\)", "", text)


@in_both_modes
def test_l7_transparent(plan: Block, eager: nn.Cell, net: nn.Cell, random: Random) -> None:
    """A lazy net looks like the plain one, before it ran, after it ran, and when copied."""
    for _ in range(2):
        assert _as_it_looks(eager) == _as_it_looks(net)
        for one, other in zip(eager.cells_and_names(), net.cells_and_names(), strict=True):
            assert one[0] == other[0]
            assert isinstance(other[1], type(one[1])) or isinstance(other[1], lazycell.LazyCell)
            kinds = (type(one[1]), type(other[1]))
            assert kinds[1] == kinds[0] or isinstance(other[1], lazycell.LazyCell)
            if not isinstance(other[1], (lazycell.LazyCell, layers.LazyShapeMixin)):
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
    assert _touching.is_touched(net.part.weight)
    assert bits(eager(inputs())) == bits(net(inputs()))
    assert_same_values(eager, net)


@in_both_modes
def test_l10_settled_classes(plan: Block, eager: nn.Cell, net: nn.Cell, random: Random) -> None:
    """Every cell that was called has its own class back; nothing of lazycell runs in its calls any more."""
    net(inputs())
    for _, cell in net.cells_and_names():
        assert _touching.state_of(cell).called != _tracking.is_watched(cell)
    assert not _tracking.is_watched(net)
