"""Freezing: what is chosen, what changes, what survives."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
from helpers import bits, deferred, names, ones
from hypothesis import given
from hypothesis import strategies as st
from mindspore import Parameter, Tensor, mint, nn
from strategies import Block, build, inputs, plans

import lazycell

pytestmark = pytest.mark.filterwarnings("ignore::lazycell.UnusedLayerWarning")

MODES = {"PyNative": ms.PYNATIVE_MODE, "Graph": ms.GRAPH_MODE}


class Block_(nn.Cell):
    """A layer with statistics, and one without."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.norm = nn.Dense(4, 4), nn.BatchNorm1d(4)

    def construct(self, x):
        return self.norm(self.dense(x))


class Net(lazycell.LazyCell):
    """A parameter of its own, blocks, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.token = Parameter(Tensor(np.ones((1, 4), np.float32)), name="token")
        self.blocks = nn.SequentialCell(Block_(), Block_())
        self.head = nn.Dense(4, 2)

    def construct(self, x):
        return self.head(self.blocks(x + self.token))


def frozen(net: nn.Cell) -> set[str]:
    """The names of parameters that require no gradient, statistics left out."""
    return {p.name for p in net.get_parameters() if not p.requires_grad and "moving" not in p.name}


BLOCK0 = {"blocks.0.dense.weight", "blocks.0.dense.bias", "blocks.0.norm.gamma", "blocks.0.norm.beta"}
BLOCK1 = {name.replace("0", "1") for name in BLOCK0}


@pytest.mark.parametrize(
    ("choose", "expected"),
    [
        (lambda n: ((n.blocks,), {}), BLOCK0 | BLOCK1),
        (lambda n: ((n.blocks[0], n.head), {}), BLOCK0 | {"head.weight", "head.bias"}),
        (lambda n: ((n.head.weight,), {}), {"head.weight"}),
        (lambda n: (([n.head.weight, n.blocks[1]],), {}), BLOCK1 | {"head.weight"}),
        (lambda n: ((p for p in n.head.get_parameters()), {}), {"head.weight", "head.bias"}),
        (lambda n: ((n, "blocks.0"), {}), BLOCK0),
        (lambda n: ((n, "blocks.?.norm", "token"), {}), {"blocks.0.norm.gamma", "blocks.0.norm.beta",
                                                         "blocks.1.norm.gamma", "blocks.1.norm.beta", "token"}),
        (lambda n: ((n, "*.bias"), {}), {"blocks.0.dense.bias", "blocks.1.dense.bias", "head.bias"}),
        (lambda n: ((n.blocks, "0.*"), {}), BLOCK0),
        (lambda n: ((n,), {"before": n.head}), BLOCK0 | BLOCK1 | {"token"}),
        (lambda n: ((n,), {"before": "blocks.1"}), BLOCK0 | {"token"}),
        (lambda n: ((n,), {"before": n.blocks[1].norm}),
         BLOCK0 | {"token", "blocks.1.dense.weight", "blocks.1.dense.bias"}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("ran", [False, True])
def test_what_is_chosen(choose, expected: set[str], ran: bool) -> None:
    """Cells with all below them, parameters, names with wildcards, all before a layer; deferred ones stay deferred."""
    net = Net()
    if ran:
        net(ones(3, 4))
    before = deferred(net)
    args, kwargs = choose(net)
    args = tuple(args)
    assert lazycell.freeze(*args, **kwargs) == len(expected)
    assert frozen(net) == expected and deferred(net) == before
    assert lazycell.freeze(*tuple(choose(net)[0]), **kwargs) == 0
    assert lazycell.unfreeze(*tuple(choose(net)[0]), **kwargs) == len(expected)
    assert not frozen(net)
    assert {p.name for p in net.get_parameters() if "moving" in p.name and p.requires_grad} == set()


@given(plans(), st.randoms(use_true_random=False))
def test_freezing_shows_everywhere(plan: Block, random) -> None:
    """Counts agree, live lists follow, and unfreezing brings back just what was there."""
    net = build(plan, lazycell.LazyCell, root=True)
    live = net.trainable_params()
    net(inputs())
    before = names(live)
    flags = [p.requires_grad for p in net.get_parameters()]
    cells = [cell for _, cell in net.cells_and_names() if random.random() < 0.3]
    if not cells:
        return
    inside = {id(p): p for cell in cells for p in cell.get_parameters() if p.requires_grad}
    assert lazycell.freeze(*cells) == len(inside)
    assert names(live) == names(net.trainable_params())
    assert not inside.keys() & set(map(id, live))
    copied = copy.deepcopy(net)
    for one in (net, copied):
        assert lazycell.unfreeze(one) == len(inside)
        assert names(one.trainable_params()) == before
        assert [p.requires_grad for p in one.get_parameters()] == flags


def test_what_its_author_froze_stays() -> None:
    """Unfreezing a cell undoes freezing it; a parameter that is named itself is unfrozen in any case."""
    net = Net()
    net.head.weight.requires_grad = False
    assert lazycell.freeze(net) == 10
    assert lazycell.unfreeze(net) == 10 and frozen(net) == {"head.weight"}
    assert lazycell.unfreeze(net, "head.*") == 0
    assert lazycell.unfreeze(net, "head.weight") == 1
    net.head.weight.requires_grad = False
    assert lazycell.unfreeze(net.head.weight) == 1


def test_what_later_layers_share_stays() -> None:
    """A parameter that the head holds as well isn't frozen with what precedes it."""

    class Tied(lazycell.LazyCell):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.middle, self.head = nn.Dense(4, 4), nn.Dense(4, 4), nn.Dense(4, 4)
            self.head.weight = self.embedding.weight

    net = Tied()
    assert lazycell.freeze(net, before=net.head) == 3
    assert net.head.weight.requires_grad and not net.embedding.bias.requires_grad


def test_cells_that_later_layers_share_stay() -> None:
    """So do cells that occur again later, their statistics too; names say which occurrence is meant."""

    class Shared(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.a, self.b = nn.BatchNorm1d(4), nn.Dense(4, 4), nn.Dense(4, 4)
            self.c = self.a
            self.head = nn.SequentialCell(self.norm, nn.Dense(4, 4))

    net = Shared()
    net.set_train()
    assert lazycell.freeze(net, before=net.b) == 0
    assert lazycell.freeze(net, before=net.head, statistics=True) == 4
    assert not net.a.weight.requires_grad and not net.b.weight.requires_grad and net.norm.gamma.requires_grad
    assert net.norm.training
    lazycell.unfreeze(net)
    assert lazycell.freeze(net, before="c") == 2 and not net.b.weight.requires_grad
    lazycell.unfreeze(net)
    assert lazycell.freeze(net, "head.1.bias", net.norm.gamma, before=net.b) == 2


def test_statistics_of_a_cell_with_children() -> None:
    """Only its own are held: what is below it trains as before."""

    class Codebook(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.moving_mean = Parameter(Tensor(np.ones(3, np.float32)), name="moving_mean", requires_grad=False)
            self.drop, self.norm = nn.Dropout(p=0.5), nn.BatchNorm1d(3)

    net = Codebook()
    net.set_train()
    lazycell.freeze(net, statistics=True)
    assert not net.training and net.drop.training and not net.norm.training
    lazycell.unfreeze(net.norm)
    net.set_train(False)
    net.set_train(True)
    assert not net.training and net.drop.training and net.norm.training
    lazycell.unfreeze(net)
    assert net.training


def test_statistics_that_always_move() -> None:
    """Instance normalization looks at nothing that could hold them, which is said."""
    net = nn.SequentialCell(nn.Dense(3, 3), nn.InstanceNorm1d(3))
    with pytest.raises(lazycell.LazyCellError, match="InstanceNorm1d moves its statistics"):
        lazycell.freeze(net, statistics=True)
    assert net[0].weight.requires_grad
    assert lazycell.freeze(net) > 0


@pytest.mark.parametrize(
    ("args", "kwargs", "error", "text"),
    [
        ((), {}, TypeError, "got nothing"),
        ((3,), {}, TypeError, "takes cells, parameters, names, and lists of these, but got a int"),
        (({"a": 1},), {}, TypeError, "but got a dict"),
        ((Tensor(1.0),), {}, TypeError, "but got a Tensor"),
        (("net", ""), {}, lazycell.LazyCellError, "is named ''"),
        (("head",), {}, lazycell.LazyCellError, "no cell to look it up in"),
        (("net", "hed"), {}, lazycell.LazyCellError, "no parameter of Net is named 'hed'. Did you mean 'head'"),
        (("net", "head", "xyz.*"), {}, lazycell.LazyCellError, r"is named 'xyz.\*'"),
        (("net",), {"before": "nothing"}, lazycell.LazyCellError, "before='nothing' isn't a layer of Net"),
        (("net",), {"before": nn.Dense(1, 1)}, lazycell.LazyCellError, "before='Dense' isn't a layer of Net"),
    ],
)
@pytest.mark.parametrize("function", [lazycell.freeze, lazycell.unfreeze])
def test_what_is_refused(function, args: tuple, kwargs: dict, error: type, text: str) -> None:
    """What names nothing is an error, and nothing has changed then."""
    net = Net()
    with pytest.raises(error, match=text):
        function(*(net if arg == "net" else arg for arg in args), **kwargs)
    assert not frozen(net)


@pytest.mark.parametrize("mode", MODES)
def test_statistics(mode: str) -> None:
    """They move as MindSpore moves them, unless they are to be kept still; then also after set_train(True)."""
    net = Net()
    net.set_train()
    ms.set_context(mode=MODES[mode])
    x = Tensor(np.random.rand(8, 4).astype(np.float32))

    def moved(cell: nn.Cell) -> list[bool]:
        before = [bits(block.norm.moving_mean) for block in cell.blocks]
        cell(x)
        return [bits(block.norm.moving_mean) != kept for block, kept in zip(cell.blocks, before)]

    assert moved(net) == [True, True]
    lazycell.freeze(net.blocks[0])
    assert moved(net) == [True, True]
    lazycell.freeze(net.blocks[0], statistics=True)
    assert moved(net) == [False, True]
    both_ways = (lambda: net.set_train(False).set_train(True), lambda: net.blocks[0].norm.set_train(True))
    for change in (net.set_train, *both_ways):
        change()
        assert moved(net) == [False, True]
    copied = copy.deepcopy(net)
    copied.set_train()
    assert moved(copied) == [False, True]
    lazycell.unfreeze(copied)
    assert moved(copied) == [True, True] and moved(net) == [False, True]
    lazycell.unfreeze(net)
    assert moved(net) == [True, True]
    net.set_train(False)
    assert moved(net) == [False, False]


def test_statistics_of_a_layer_that_always_uses_the_batchs() -> None:
    """A layer that was told to use the batch's statistics uses its own while they are kept still."""
    net = nn.SequentialCell(nn.BatchNorm1d(4, use_batch_statistics=True), mint.nn.BatchNorm1d(4))
    lazycell.freeze(net, statistics=True)
    net.set_train()
    assert net[0].use_batch_statistics is False and not net[0].training and not net[1].training
    before = bits(net[0].moving_mean)
    net[0](Tensor(np.random.rand(8, 4).astype(np.float32)))
    assert bits(net[0].moving_mean) == before
    lazycell.unfreeze(net)
    assert net[0].use_batch_statistics is True and net[0].training and net[1].training


@pytest.mark.parametrize("how", ["a dict", "a checkpoint"])
def test_freeze_state(how: str, tmp_path: Path) -> None:
    """It is saved with a checkpoint, and restored into a new net, which can be unfrozen from there."""
    net = Net()
    net(ones(3, 4))
    lazycell.freeze(net, before=net.head, statistics=True)
    state = lazycell.freeze_state(net)
    assert state["requires_grad.head.weight"] is True and state["requires_grad.token"] is False
    assert state["statistics.blocks.0.norm"] is False
    path = str(tmp_path / "net.ckpt")
    ms.save_checkpoint(net, path, append_dict=state)
    fresh = Net()
    lazycell.load_freeze_state(fresh, state if how == "a dict" else ms.load_checkpoint(path))
    assert frozen(fresh) == frozen(net) and lazycell.freeze_state(fresh) == state
    assert deferred(fresh)
    fresh.set_train()
    assert not fresh.blocks[0].norm.training
    assert lazycell.unfreeze(fresh) == 9 and not frozen(fresh) and fresh.blocks[0].norm.training


def test_freeze_state_of_another_net() -> None:
    """It is refused, and changes nothing."""
    net, state = Net(), lazycell.freeze_state(Net())
    lazycell.freeze(net.head)
    before = lazycell.freeze_state(net)
    fewer = {key: False for key in state if "token" not in key}
    for wrong, text in (
        ({"other": 1}, "holds no entry of lazycell.freeze_state"),
        (fewer, "the state lacks 'requires_grad.token'"),
        ({**state, "requires_grad.x": True}, "Net lacks 'requires_grad.x'"),
    ):
        with pytest.raises(lazycell.LazyCellError, match=text):
            lazycell.load_freeze_state(net, wrong)
    assert lazycell.freeze_state(net) == before
    for wrong, text in ((None, "takes a dict"), ({"requires_grad.token": "False"}, "is the text 'False'")):
        with pytest.raises(TypeError, match=text):
            lazycell.load_freeze_state(net, wrong)


class TestSpelling:
    """A misspelt attribute freezes nothing, and that is said."""

    def test_before_the_first_call(self) -> None:
        """At the line that assigns it, once for each line."""
        net = Net()
        with pytest.warns(lazycell.LazyCellWarning, match="blocks.0.dense.weight.require_grad was assigned") as caught:
            for parameter in net.blocks.get_parameters():
                parameter.require_grad = False
        assert len(caught) == 1 and caught[0].filename == __file__

    @pytest.mark.parametrize("name", ["require_grad", "required_grad", "requires_gradient"])
    def test_after_it(self, name: str) -> None:
        """When the parameters are asked for."""
        net = Net()
        net(ones(3, 4))
        setattr(net.head.weight, name, False)
        with pytest.warns(lazycell.LazyCellWarning, match=f"head.weight.{name} was assigned"):
            net.trainable_params()

    def test_the_right_name(self) -> None:
        """It works, and says nothing."""
        net = Net()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            net.head.weight.requires_grad = False
            net.head.weight.my_own = 1
            net(ones(3, 4))
            assert "head.weight" not in names(net.trainable_params())
