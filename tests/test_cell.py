"""LazyCell as a class, and what can be done with a tracked cell."""

from __future__ import annotations

import abc
import inspect
import threading
import warnings
from dataclasses import dataclass

import mindspore as ms
import numpy as np
import pytest
from helpers import assert_same_values, bits, both, deferred, is_deferred, names, ones, touched
from mindspore import Parameter, Tensor, nn, ops

import lazycell
from lazycell import _touching, _tracking

pytestmark = pytest.mark.filterwarnings("ignore::lazycell.UnusedLayerWarning")

X = ones(1, 2)


class Net(lazycell.LazyCell):
    """A net with a layer that is used and one that isn't."""

    def __init__(self, width: int = 2, *, bias: bool = True) -> None:
        """Own arguments."""
        super().__init__()
        self.a = nn.Dense(2, width, has_bias=bias)
        self.b = nn.Dense(2, width, has_bias=bias)

    def construct(self, x: Tensor) -> Tensor:
        return self.a(x)


class TestClass:
    """LazyCell behaves as nn.Cell does (L7)."""

    def test_is_a_cell(self) -> None:
        """isinstance, name, repr, signature and docstring."""
        net = Net(3, bias=False)
        assert isinstance(net, nn.Cell) and isinstance(net, lazycell.LazyCell) and isinstance(net, Net)
        assert type(net).__name__ == "Net" and type(net).__qualname__ == "Net" and net.cls_name == "Net"
        assert type(net).__module__ == __name__
        assert repr(net).startswith("Net(\n  (a): Dense(input_channels=2, output_channels=3)")
        assert list(inspect.signature(Net).parameters) == ["width", "bias"]
        assert Net.__init__.__doc__ == "Own arguments."
        net(X)
        assert type(net) is Net

    def test_constructor_arguments_of_cell(self) -> None:
        """``auto_prefix`` and ``flags`` go where they went."""

        class Bare(lazycell.LazyCell):
            def __init__(self) -> None:
                super().__init__(auto_prefix=False, flags={"own": 3})
                self.a = nn.Dense(2, 2)

        assert names(Bare().get_parameters()) == ["weight", "bias"] and Bare().own == 3

    def test_without_init(self) -> None:
        """A class that defines no ``__init__``, or inherits it from a mixin, defers all the same."""

        class Mixin:
            def __init__(self) -> None:
                super().__init__()
                self.a = nn.Dense(2, 2)

        class Mixed(Mixin, lazycell.LazyCell):
            pass

        class Derived(Net):
            pass

        @dataclass(eq=False)
        class Data(lazycell.LazyCell):
            width: int = 2

            def __post_init__(self) -> None:
                width = self.__dict__.pop("width", 2)
                super().__init__()
                self.a = nn.Dense(2, width)

        for made in (Mixed(), Derived(), Data()):
            assert deferred(made) == {p.name for p in made.get_parameters()} != set()

    def test_bases_without_init(self) -> None:
        """An instance of a base without ``__init__`` changes nothing for classes that inherit from several."""

        class Bare(lazycell.LazyCell):
            pass

        class Makes(lazycell.LazyCell):
            def __init__(self) -> None:
                super().__init__()
                self.made = nn.Dense(2, 2)

        class Combined(Bare, Makes):
            pass

        Bare()
        assert len(deferred(Combined())) == 2

    def test_sources_can_be_found(self) -> None:
        """MindSpore reads the sources of a net's classes, LazyCell's included."""
        assert inspect.getsource(lazycell.LazyCell).startswith("class LazyCell(nn.Cell)")
        assert inspect.getsource(type(Net())) == inspect.getsource(Net)

    def test_layers_built_before_super_init(self) -> None:
        """The constructor counts from its first line."""

        class Early(lazycell.LazyCell):
            def __init__(self) -> None:
                layer = nn.Dense(2, 2)
                super().__init__()
                self.a = layer

        assert len(deferred(Early())) == 2

    def test_abstract_base(self) -> None:
        """Multiple inheritance with an abstract base class."""

        class Abstract(abc.ABC):
            @abc.abstractmethod
            def head(self) -> nn.Cell: ...

        class Concrete(Net, Abstract):
            def head(self) -> nn.Cell:
                return self.b

        net = Concrete()
        assert isinstance(net, Abstract)
        net(X)
        assert touched(net) == {"a.weight", "a.bias"} and net.head() is net.b

    def test_constructor_that_fails(self) -> None:
        """Its error is the user's own; what it left behind is usable, and later nets are lazy."""
        kept: list[nn.Cell] = []

        class Fails(lazycell.LazyCell):
            def __init__(self) -> None:
                super().__init__()
                self.a = nn.Dense(2, 2, "ones", "ones")
                kept.append(self.a)
                raise KeyError("constructor")

        with pytest.raises(KeyError):
            Fails()
        assert kept[0](X).asnumpy().tolist() == [[3.0, 3.0]]
        assert len(deferred(Net())) == 4

    def test_construction_inside_construct(self) -> None:
        """A net that builds a net while it runs."""

        class Builds(lazycell.LazyCell):
            def construct(self, x: Tensor) -> Tensor:
                inner = Net()
                assert all(map(is_deferred, _touching.own_parameters(inner.a)))
                return inner(x)

        assert Builds()(X).shape == (1, 2)

    def test_same_training_with_an_own_optimizer_loop(self) -> None:
        """Gradient, momentum and decay of the used layers are the eager ones; the dead one doesn't move."""

        def make(base: type[nn.Cell]) -> nn.Cell:
            class Model(base):
                def __init__(self) -> None:
                    super().__init__()
                    self.a, self.b = nn.Dense(2, 2), nn.Dense(2, 2)

                def construct(self, x: Tensor) -> Tensor:
                    return self.a(x)

            return Model()

        eager, net = both(make)
        eager(X), net(X)
        ours = [p for p in eager.trainable_params() if p.name.startswith("a.")]
        steps = [nn.TrainOneStepCell(nn.WithLossCell(n, nn.MSELoss()), nn.Momentum(w, 0.1, 0.9, 0.01))
                 for n, w in ((eager, ours), (net, net.trainable_params()))]  # fmt: skip
        for _ in range(5):
            for step in steps:
                step(X, X)
        assert bits(eager.a.weight) == bits(net.a.weight)
        assert len(deferred(net)) == 2
        assert_same_values(eager, net)


class TestTrack:
    """`lazycell.track`."""

    def test_adopts_a_plain_net(self) -> None:
        """From then on its use is known, late additions included; the values stay."""
        net = nn.SequentialCell(nn.Dense(2, 2), nn.ReLU(), nn.Dense(2, 2))
        value = bits(net[0].weight)
        assert lazycell.track(net) is net and lazycell.track(net) is net
        assert names(lazycell.trainable_params(net)[:]) == []
        net[0](X)
        assert names(lazycell.trainable_params(net)) == ["0.weight", "0.bias"]
        assert bits(net[0].weight) == value
        assert lazycell.registry(net).untouched == ("1", "2")
        net(X)
        assert lazycell.registry(net).untouched == () and type(net) is nn.SequentialCell

    def test_layers_that_ran_before(self) -> None:
        """They count as used: nobody saw what they read."""
        net = nn.CellList([nn.Dense(2, 2), nn.Dense(2, 2)])
        net[1](X)
        lazycell.track(net)
        assert lazycell.registry(net).touched == ("1",)
        assert [record.where for record in lazycell.registry(net).layers] == [None, None]
        assert names(lazycell.trainable_params(net)) == ["1.weight", "1.bias"]

    def test_a_net_that_ran_before_reports_at_its_next_pass(self) -> None:
        """Once, however often it is tracked."""

        class Plain(nn.Cell):
            def __init__(self) -> None:
                super().__init__()
                self.a, self.dead = nn.Dense(2, 2), nn.Dense(2, 2)

            def construct(self, x: Tensor) -> Tensor:
                return self.a(x)

        net = Plain()
        net(X)
        lazycell.track(net)
        with pytest.warns(lazycell.UnusedLayerWarning, match="dead"):
            net(X)
        lazycell.track(net)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            net(X)


class TestReleaseAndMaterialize:
    """`lazycell.release` and `lazycell.materialize`."""

    def test_round_trip(self) -> None:
        """Released parameters come back bit for bit, whatever their values came from."""

        def make(base: type[nn.Cell]) -> nn.Cell:
            class Model(base):
                def __init__(self) -> None:
                    super().__init__()
                    self.a, self.lstm, self.bn = nn.Dense(2, 2), nn.LSTM(2, 2), nn.BatchNorm1d(2)

                def construct(self, x: Tensor) -> Tensor:
                    return x

            return Model()

        eager, net = both(make)
        objects = list(net.get_parameters())
        assert lazycell.release(net) == 0
        lazycell.materialize(net)
        assert not deferred(net) and not touched(net)
        eager.a.weight.set_data(eager.a.weight + 1)
        net.a.weight.set_data(net.a.weight + 1)
        total = sum(p.nbytes for p in net.get_parameters())
        assert lazycell.release(net) == total == lazycell.registry(net).deferred_nbytes
        assert lazycell.release(net) == 0
        lazycell.materialize(net)
        lazycell.materialize(net)
        assert_same_values(eager, net)
        assert list(map(id, objects)) == list(map(id, net.get_parameters()))

    def test_release_keeps_what_is_used(self) -> None:
        """Only the storage of untouched parameters is freed; a released layer works when it is called."""
        net = lazycell.track(nn.CellList([nn.Dense(2, 2), nn.Dense(2, 2)]))
        plain = nn.Dense(2, 2)
        ms.load_param_into_net(plain, {"weight": net[1].weight, "bias": net[1].bias})
        net[0](X)
        assert lazycell.release(net) == 24
        assert deferred(net) == {"1.weight", "1.bias"}
        assert bits(net[1](X)) == bits(plain(X))
        assert names(lazycell.trainable_params(net)) == ["0.weight", "0.bias", "1.weight", "1.bias"]

    def test_materialize_of_a_plain_cell(self) -> None:
        """Allocates nothing, and is no error."""
        lazycell.materialize(nn.Dense(2, 2))


class TestRefusing:
    """Cells that can't be watched fall under law L9."""

    def test_slots(self) -> None:
        """A class with slots of its own is allocated, counts as used, and is named in a warning."""

        class Slotted(nn.Cell):
            __slots__ = ("kept",)

            def __init__(self) -> None:
                super().__init__()
                self.weight = Parameter(Tensor(np.ones(2, np.float32)), name="weight")

            def construct(self, x: Tensor) -> Tensor:
                return ops.mul(x, self.weight)

        class Holder(lazycell.LazyCell):
            def __init__(self) -> None:
                super().__init__()
                self.part = Slotted()

            def construct(self, x: Tensor) -> Tensor:
                return x

        with pytest.warns(lazycell.LazyCellWarning, match="Slotted can't be watched") as caught:
            net = Holder()
        assert caught[0].filename == __file__
        assert not deferred(net) and names(net.trainable_params()) == ["part.weight"]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            net(X)
        assert not _tracking.is_watched(net.part)


def test_construction_in_many_threads() -> None:
    """MindSpore is as it was when the last of several constructors is done."""
    before = [Parameter.__init__, nn.Cell.__init__, "init_param" in Parameter.__dict__]
    made: list[Net] = []
    threads = [threading.Thread(target=lambda: made.append(Net())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(len(deferred(net)) == 4 for net in made) and len(made) == 8
    assert before == [Parameter.__init__, nn.Cell.__init__, "init_param" in Parameter.__dict__]
