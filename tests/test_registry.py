"""Records, live lists and warnings."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
import weakref

import mindspore as ms
import pytest
from helpers import names, ones
from mindspore import Tensor, nn

import lazycell
from lazycell import LayerState, _touching

X = ones(1, 3)


class Block(nn.Cell):
    """A plain cell with two layers, of which it uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Dense(3, 3)
        self.second = nn.Dense(3, 3, has_bias=False)

    def construct(self, x: Tensor) -> Tensor:
        return self.first(x)


class Net(lazycell.LazyCell):
    """A net with a block that is used and one that isn't."""

    def __init__(self) -> None:
        super().__init__()
        self.live = Block()
        self.dead = Block()
        self.act = nn.ReLU()

    def construct(self, x: Tensor) -> Tensor:
        return self.live(x)


@pytest.fixture
def net() -> Net:
    """A net that has run."""
    made = Net()
    with pytest.warns(lazycell.UnusedLayerWarning):
        made(X)
    return made


class TestRegistry:
    """`lazycell.registry`."""

    def test_records(self, net: Net) -> None:
        """One record for each layer, in the order of definition."""
        records = lazycell.registry(net).layers
        assert [(r.name, r.cls_name, r.state, r.num_parameters, r.nbytes, r.trainable, r.order) for r in records] == [
            ("live", "Block", LayerState.TOUCHED, 0, 0, False, 0),
            ("live.first", "Dense", LayerState.TOUCHED, 12, 48, True, 1),
            ("live.second", "Dense", LayerState.DEFERRED, 9, 36, True, None),
            ("dead", "Block", LayerState.DEFERRED, 0, 0, False, None),
            ("dead.first", "Dense", LayerState.DEFERRED, 12, 48, True, None),
            ("dead.second", "Dense", LayerState.DEFERRED, 9, 36, True, None),
            ("act", "ReLU", LayerState.DEFERRED, 0, 0, False, None),
        ]

    def test_where(self, net: Net) -> None:
        """The user's line that assigned each layer."""
        lines = open(__file__, encoding="utf-8").read().splitlines()
        for record in lazycell.registry(net).layers:
            file, _, line = record.where.rpartition(":")
            assert file == __file__
            assert f"self.{record.name.split('.')[-1]} = " in lines[int(line) - 1]

    def test_sums(self, net: Net) -> None:
        """Counts and bytes, of all and by state."""
        registry = lazycell.registry(net)
        assert registry.touched == ("live", "live.first")
        assert registry.untouched == ("live.second", "dead", "dead.first", "dead.second", "act")
        assert (registry.num_parameters, registry.touched_parameters, registry.untouched_parameters) == (42, 12, 30)
        assert (registry.nbytes, registry.allocated_nbytes, registry.deferred_nbytes) == (168, 48, 120)
        lazycell.materialize(net.dead)
        assert (registry.allocated_nbytes, registry.deferred_nbytes) == (132, 36)
        assert registry.layers[4].state is LayerState.MATERIALIZED

    def test_table(self, net: Net) -> None:
        """The table, as it is printed."""
        assert str(lazycell.registry(net)).splitlines() == [
            "layer        class  state     parameters  bytes",
            "-----------------------------------------------",
            "live         Block  touched            -      -",
            "live.first   Dense  touched           12   48 B",
            "live.second  Dense  deferred           9   36 B",
            "dead         Block  deferred           -      -",
            "dead.first   Dense  deferred          12   48 B",
            "dead.second  Dense  deferred           9   36 B",
            "act          ReLU   deferred           -      -",
            "-----------------------------------------------",
            "2 of 7 layers used; 12 of 42 parameters touched",
            "48 B allocated, 120 B deferred",
        ]
        assert repr(lazycell.registry(net)) == "<LayerRegistry of Net: 2 of 7 layers used>"

    def test_table_fits_in_80_columns(self) -> None:
        """Also with long names, long classes and large numbers."""

        class AClassWithAVeryLongNameIndeed(nn.Dense):
            pass

        class Long(lazycell.LazyCell):
            def __init__(self) -> None:
                super().__init__()
                self.a_very_long_attribute_name_for_a_block = nn.CellList([AClassWithAVeryLongNameIndeed(40000, 40000)])
                self.another_long_name_of_a_used_layer = AClassWithAVeryLongNameIndeed(9999, 1000)

        net = Long()
        for _ in range(2):
            assert 70 < max(map(len, str(lazycell.registry(net)).splitlines())) <= 80
            lazycell.materialize(net.another_long_name_of_a_used_layer)

    def test_table_shortens_only_what_it_must(self) -> None:
        """Names and classes that fit are whole; a cell's own parameters have a row."""

        class AClassWithAVeryLongNameIndeed(lazycell.LazyCell):
            def __init__(self) -> None:
                super().__init__()
                self.own = ms.Parameter(ms.ops.ones(3), name="own")
                self.act = nn.AdaptiveAvgPool2d(1)

        table = str(lazycell.registry(AClassWithAVeryLongNameIndeed())).splitlines()
        assert table[2].split() == ["(itself)", "AClassWithAVeryLongNameIndeed", "deferred", "3", "12", "B"]
        assert table[3].split()[:2] == ["act", "AdaptiveAvgPool2d"]

    def test_shared_parameters_count_once(self) -> None:
        """Where they come first."""

        class Tied(lazycell.LazyCell):
            def __init__(self) -> None:
                super().__init__()
                self.one, self.two = nn.Dense(3, 3, has_bias=False), nn.Dense(3, 3, has_bias=False)
                self.two.weight = self.one.weight
                self.again = self.one

            def construct(self, x: Tensor) -> Tensor:
                return self.two(x)

        registry = lazycell.registry(Tied())
        assert [(r.name, r.num_parameters) for r in registry.layers] == [("one", 9), ("two", 0)]
        assert registry.num_parameters == 9

    def test_a_view_on_a_subtree(self, net: Net) -> None:
        """Names are relative to the cell that was asked for."""
        assert lazycell.registry(net.live).touched == ("first",)
        assert lazycell.registry(net.dead).touched == ()

    def test_reset(self, net: Net) -> None:
        """Touches are forgotten, storage and values stay, and the next forward pass reports anew."""
        live, value = net.trainable_params(), net.live.first.weight.asnumpy()
        lazycell.registry(net).reset()
        assert list.__len__(live) == 0 and lazycell.registry(net).touched == ()
        assert lazycell.registry(net).layers[1].state is LayerState.MATERIALIZED
        with pytest.warns(lazycell.UnusedLayerWarning):
            net(X)
        assert names(live) == ["live.first.weight", "live.first.bias"]
        assert (net.live.first.weight.asnumpy() == value).all()

    @pytest.mark.parametrize("ask", [lazycell.registry, lazycell.trainable_params, lazycell.release])
    def test_refuses_what_is_not_tracked(self, ask) -> None:
        """With an error that says what to do."""
        with pytest.raises(lazycell.LazyCellError, match=r"Dense isn't tracked.*lazycell\.track"):
            ask(nn.Dense(2, 2))

    @pytest.mark.parametrize(
        "ask",
        [
            lazycell.registry,
            lazycell.trainable_params,
            lazycell.release,
            lazycell.track,
            lazycell.materialize,
            lazycell.optional,
        ],
    )
    def test_refuses_what_is_no_cell(self, ask) -> None:
        """With a TypeError that names what was given."""
        with pytest.raises(TypeError, match="expected a mindspore.nn.Cell, but got list"):
            ask([nn.Dense(2, 2)])


class TestOnTouch:
    """Callbacks."""

    @pytest.mark.filterwarnings("ignore::lazycell.UnusedLayerWarning")
    def test_once_for_each_layer(self) -> None:
        """In the order of use, containers included, until removed."""
        net = Net()
        seen: list[lazycell.LayerRecord] = []
        handle = lazycell.registry(net).on_touch(seen.append)
        net(X)
        net(X)
        assert [record.name for record in seen] == ["live", "live.first"]
        assert all(record.state is LayerState.TOUCHED for record in seen)
        net.act(X)
        assert seen[-1].name == "act"
        handle.remove()
        handle.remove()
        net.dead(X)
        assert len(seen) == 3

    @pytest.mark.filterwarnings("ignore::lazycell.UnusedLayerWarning")
    def test_again_after_a_reset(self) -> None:
        """Layers whose touches were forgotten are told of again."""
        net = Net()
        net(X)
        seen: list[str] = []
        lazycell.registry(net).on_touch(lambda record: seen.append(record.name))
        lazycell.registry(net.live).reset()
        net(X)
        assert seen == ["live", "live.first"]

    @pytest.mark.filterwarnings("ignore::lazycell.UnusedLayerWarning")
    def test_a_layer_whose_parameter_is_only_read(self) -> None:
        """It is used by that, and so are the containers above it."""

        class Reads(Net):
            def construct(self, x: Tensor) -> Tensor:
                return x + self.dead.first.bias

        net = Reads()
        seen: list[str] = []
        lazycell.registry(net).on_touch(lambda record: seen.append(record.name))
        net(X)
        assert sorted(seen) == ["dead", "dead.first"]

    @pytest.mark.filterwarnings("ignore::lazycell.UnusedLayerWarning")
    def test_containers_of_shared_cells(self) -> None:
        """Every container above a used layer is told of, and so is every layer whose parameter is in use."""

        class Shared(lazycell.LazyCell):
            def __init__(self) -> None:
                super().__init__()
                shared = nn.CellList([nn.Dense(3, 3)])
                self.p, self.q = nn.CellList([shared]), nn.CellList([shared])
                self.tied = nn.Dense(3, 3)
                self.tied.weight = shared[0].weight

            def construct(self, x: Tensor) -> Tensor:
                return self.q[0][0](x)

        net = Shared()
        seen: list[lazycell.LayerRecord] = []
        lazycell.registry(net).on_touch(seen.append)
        net(X)
        assert sorted(record.name for record in seen) == ["p", "p.0", "p.0.0", "q", "tied"]
        assert [record.order for record in seen] == [0, 1, 2, 3, 4]
        assert set(lazycell.registry(net).touched) == {record.name for record in seen}

    @pytest.mark.filterwarnings("ignore::lazycell.UnusedLayerWarning")
    def test_all_callbacks_are_told_when_one_fails(self) -> None:
        """Once per layer, whoever else fails."""
        net = Net()
        logs: list[list[str]] = [[], [], []]

        def fail(record: lazycell.LayerRecord) -> None:
            raise KeyError(record.name)

        for log in logs:
            lazycell.registry(net).on_touch(lambda record, log=log: log.append(record.name))
        handle = lazycell.registry(net).on_touch(fail)
        with pytest.raises(KeyError):
            net(X)
        handle.remove()
        net(X)
        assert [sorted(log) for log in logs] == [["live", "live.first"]] * 3

    @pytest.mark.filterwarnings("ignore::lazycell.UnusedLayerWarning")
    def test_an_error_in_a_callback_is_the_users(self) -> None:
        """It comes out of the forward pass; the net works on."""
        net = Net()

        def fail(record: lazycell.LayerRecord) -> None:
            raise KeyError(record.name)

        handle = lazycell.registry(net).on_touch(fail)
        with pytest.raises(KeyError):
            net(X)
        handle.remove()
        net(X)
        assert lazycell.registry(net).touched == ("live", "live.first")


class TestWarning:
    """`UnusedLayerWarning`."""

    def test_topmost_and_totals(self) -> None:
        """The topmost of an unused subtree stands for all below it."""
        with pytest.warns(lazycell.UnusedLayerWarning) as caught:
            Net()(X)
        (entry,) = caught
        assert entry.filename == __file__
        assert [(r.name, r.num_parameters, r.nbytes) for r in entry.message.layers] == [
            ("live.second", 9, 36),
            ("dead", 21, 84),
            ("act", 0, 0),
        ]
        assert entry.message.nbytes == 120

    def test_only_once(self, net: Net) -> None:
        """After the first completed forward pass, and never again."""
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            net(X)
            net.construct(X)

    def test_as_an_error(self) -> None:
        """Turned into an exception, it leaves a usable net."""
        net = Net()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(lazycell.UnusedLayerWarning):
                net(X)
            net(X)
        assert names(net.trainable_params()) == ["live.first.weight", "live.first.bias"]

    def test_optional(self) -> None:
        """What is declared optional, and all below it, isn't warned of."""
        net = Net()
        assert lazycell.optional(net.dead) is net.dead
        lazycell.optional(net.live.second)
        lazycell.optional(net.act)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            net(X)
        assert "dead" in lazycell.registry(net).untouched

    def test_direct_construct_as_the_first_forward(self) -> None:
        """A forward pass by ``construct`` reports as one by a call does."""
        with pytest.warns(lazycell.UnusedLayerWarning) as caught:
            Net().construct(X)
        assert len(caught) == 1 and caught[0].filename == __file__

    def test_containers_of_optional_layers(self) -> None:
        """A container is optional if all in it is; else only the rest counts."""

        class Heads(lazycell.LazyCell):
            def __init__(self) -> None:
                super().__init__()
                self.all = nn.CellList([lazycell.optional(nn.Dense(3, 3)) for _ in range(2)])
                self.some = nn.CellList([lazycell.optional(nn.Dense(3, 3)), nn.Dense(3, 1)])

            def construct(self, x: Tensor) -> Tensor:
                return x

        with pytest.warns(lazycell.UnusedLayerWarning) as caught:
            Heads()(X)
        assert [(r.name, r.nbytes) for r in caught[0].message.layers] == [("some", 16)]
        assert caught[0].message.nbytes == 16

    def test_inside_layers_of_mindspore(self) -> None:
        """What MindSpore's own layers leave unused inside, and its helper cells, aren't the user's matter."""

        class Uses(lazycell.LazyCell):
            def __init__(self) -> None:
                super().__init__()
                self.gru = nn.GRU(3, 3, 2)
                self.dense = nn.Dense(3, 3)
                self.dense.recompute()

            def construct(self, x: Tensor) -> Tensor:
                return self.dense(self.gru(x.reshape(1, 1, 3))[0])

        net = Uses()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            net(X)
        assert not [name for name in lazycell.registry(net).touched if "recompute" in name]

    @pytest.mark.parametrize("dead_first", [False, True])
    def test_a_dead_layer_tied_to_a_live_one(self, dead_first: bool) -> None:
        """Its parameter is in use, so it counts as used, whichever is defined first."""

        class Tied(lazycell.LazyCell):
            def __init__(self) -> None:
                super().__init__()
                first, second = nn.Dense(3, 3), nn.Dense(3, 3)
                self.one, self.two = first, second
                second.weight = first.weight
                self.position = 1 if dead_first else 0

            def construct(self, x: Tensor) -> Tensor:
                return (self.one, self.two)[self.position](x)

        net = Tied()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            net(X)
        assert lazycell.registry(net).touched == ("one", "two")

    def test_cells_that_hold_each_other(self) -> None:
        """A cycle ends, and what is used doesn't count as unused."""
        first, second = Net(), Net()
        first.other, second.other = second, first
        with pytest.warns(lazycell.UnusedLayerWarning) as caught:
            first(X)
        layers = {r.name: r.num_parameters for r in caught[0].message.layers}
        assert layers == {
            "live.second": 9, "dead": 21, "act": 0, "other.live": 21, "other.dead": 21, "other.act": 0
        }  # fmt: skip

    def test_nothing_unused_nothing_said(self) -> None:
        """A net that uses all it has is silent."""

        class Full(lazycell.LazyCell):
            def __init__(self) -> None:
                super().__init__()
                self.body = nn.SequentialCell(nn.Dense(3, 3), nn.BatchNorm1d(3), nn.ReLU())
                self.blocks = nn.CellList([nn.Dense(3, 3)])

            def construct(self, x: Tensor) -> Tensor:
                return self.blocks[0](self.body(x))

        with warnings.catch_warnings():
            warnings.simplefilter("error")
            Full()(X)


class TestTouchedParameters:
    """Live lists."""

    def test_untouched_warning(self) -> None:
        """Iterating before any forward pass warns, names the way out, and points at the user's line."""
        net = Net()
        live = net.trainable_params()
        with pytest.warns(lazycell.UntouchedWarning, match=r"(?s)Call the net.*get_parameters\(\)") as caught:
            assert list(live) == []
        assert caught[0].filename == __file__
        with pytest.warns(lazycell.UntouchedWarning):
            with pytest.raises(ValueError, match="empty"):
                nn.Adam(net.trainable_params())

    def test_len_and_construction_are_silent(self) -> None:
        """Only iterating is a sign of a mistake."""
        net = Net()
        assert len(net.trainable_params()) == 0 and not net.trainable_params()
        assert repr(net.trainable_params()) == "[]"

    def test_ordinary_lists_come_out(self, net: Net) -> None:
        """Slices, copies and sorted lists are plain."""
        live = net.trainable_params()
        assert isinstance(live, list) and type(live) is lazycell.TouchedParameters
        for plain in (live[:], list(live), sorted(live, key=id), live + [], copy.copy(live)):
            assert type(plain) is list and len(plain) == 2
        assert type(copy.deepcopy(live)) is list
        assert live is not net.trainable_params()

    def test_frozen_parameters_are_left_out(self, net: Net) -> None:
        """Also those that are frozen later."""
        live = net.trainable_params()
        net.live.first.weight.requires_grad = False
        assert names(live) == names(net.trainable_params()) == ["live.first.bias"]
        net.live.first.weight.requires_grad = True
        assert names(live) == ["live.first.weight", "live.first.bias"]

    def test_recurse(self, net: Net) -> None:
        """Without the cells below, only a cell's own parameters."""
        assert net.trainable_params(recurse=False) == []
        live = lazycell.trainable_params(net.live.first, recurse=False)
        assert names(live) == ["live.first.weight", "live.first.bias"]

    def test_no_strong_references(self) -> None:
        """A net that is dropped with its lists and callbacks is gone, also if these refer to it."""
        net = Net()
        live = net.trainable_params()
        view = lazycell.registry(net)
        view.on_touch(lambda record, view=view: print(view.touched))
        reference = weakref.ref(net)
        del net, live, view
        gc.collect()
        assert reference() is None

    @pytest.mark.filterwarnings("ignore::lazycell.UnusedLayerWarning")
    def test_a_list_of_a_temporary_container(self) -> None:
        """It is filled although nothing else keeps the container."""
        net, other = Net(), Net()
        live = lazycell.trainable_params(nn.CellList([net, other]))
        Net()
        net(X)
        assert [p is q for p, q in zip(live, net.trainable_params())] == [True, True]

    def test_length_after_a_change(self, net: Net) -> None:
        """What was removed doesn't count."""
        live = net.trainable_params()
        del net.live
        assert len(live) == 0

    def test_untouched_through_a_plain_wrapper(self) -> None:
        """A plain cell around a net that never ran: the same warning."""
        outer = nn.WithLossCell(Net(), nn.MSELoss())
        with pytest.warns(lazycell.UntouchedWarning):
            assert list(lazycell.trainable_params(outer)) == []

    def test_a_parameter_of_another_net_is_never_taken_in(self) -> None:
        """Also not when it comes to live where a dead one was."""
        net = Net()
        live = net.trainable_params()
        for _ in range(20):
            other = lazycell.track(nn.Dense(3, 3))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                other(X)
            del other
        assert list.__len__(live) == 0

    def test_untracked_cells_beside_tracked_ones(self) -> None:
        """What can't be tracked counts as touched."""

        class Plain(nn.Cell):
            def __init__(self) -> None:
                super().__init__()
                self.lazy, self.plain = Net(), nn.Dense(3, 3)

            def construct(self, x: Tensor) -> Tensor:
                return self.plain(self.lazy(x))

        net = Plain()
        with pytest.warns(lazycell.UnusedLayerWarning):
            net(X)
        assert names(lazycell.trainable_params(net)) == [
            "lazy.live.first.weight",
            "lazy.live.first.bias",
            "plain.weight",
            "plain.bias",
        ]

    def test_pickle_fails_as_for_mindspore(self, net: Net) -> None:
        """A live list pickles as a plain list does."""
        with pytest.raises(Exception) as plain:
            pickle.dumps(net)
        assert plain.value is not None
        assert type(pickle.loads(pickle.dumps(net.trainable_params()))) is list


def test_many_observers_do_not_pile_up(net: Net) -> None:
    """Lists that are gone are forgotten."""
    gc.collect()
    before = len(_touching.observers)
    for _ in range(50):
        net.trainable_params()
    gc.collect()
    assert len(_touching.observers) == before
    assert ms.get_context("mode") == ms.PYNATIVE_MODE
