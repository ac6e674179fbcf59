"""Which layers and parameters count as used."""

from __future__ import annotations

import copy
import sys
import threading
import warnings
from collections import OrderedDict

import mindspore as ms
import pytest
from helpers import assert_same_values, bits, both, deferred, names, ones, touched
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops
from mindspore.common.initializer import initializer

import lazycell
from lazycell import _tracking

pytestmark = pytest.mark.filterwarnings("ignore::lazycell.UnusedLayerWarning")


def weight(name: str = "w", size: int = 2) -> Parameter:
    """A small parameter."""
    return Parameter(initializer("normal", (size,)), name=name)


class Net(lazycell.LazyCell):
    """A net whose children and ``construct`` are given."""

    def __init__(self, forward, **children) -> None:
        super(type(self), self).__init__()
        for name, make in children.items():
            setattr(self, name, make())
        object.__setattr__(self, "forward", forward)

    def construct(self, *args):
        return self.forward(self, *args)


class PlainTwin(nn.Cell):
    """The same on ``nn.Cell``."""

    __init__ = Net.__init__
    construct = Net.construct


def dense() -> nn.Cell:
    """A layer that takes and gives two numbers."""
    return nn.Dense(2, 2)


X = ones(1, 2)


def test_only_the_parameter_that_is_read() -> None:
    """Of two parameters of one cell, the unread one is neither touched nor allocated."""
    net = Net(lambda self, x: x + self.a, a=lambda: weight("a"), b=lambda: weight("b"))
    net(X)
    assert touched(net) == {"a"} and deferred(net) == {"b"}
    assert names(net.trainable_params()) == ["a"]


def test_reads_outside_a_forward() -> None:
    """Shape, printing, counting and listing touch and allocate nothing; reading values allocates without touching."""
    net = Net(lambda self, x: x, fc=dense, other=dense)
    net(X)
    assert net.fc.weight.shape == (2, 2)
    str(net), repr(net), str(net.fc.weight), list(net.get_parameters()), net.parameters_dict(), net.state_dict()
    sum(p.size for p in net.trainable_params()), list(net.cells_and_names()), net.fc.weight.nbytes
    assert len(deferred(net)) == 4
    net.fc.weight.asnumpy()
    assert net.other.bias + 1 is not None
    assert deferred(net) == {"fc.bias", "other.weight"}
    assert not touched(net)


def test_read_without_calling_the_owner() -> None:
    """A tied embedding: the table is used, the rest of its owner isn't."""
    net = Net(
        lambda self, x: ops.matmul(x, self.embedding.embedding_table.T),
        embedding=lambda: nn.Embedding(3, 2),
        dead=dense,
    )
    net(X)
    assert touched(net) == {"embedding.embedding_table"}
    assert lazycell.registry(net).touched == ("embedding",)


def test_direct_construct() -> None:
    """Calling ``construct`` is an invocation; looking at it isn't."""
    net = Net(lambda self, x: self.a.construct(x), a=dense, b=dense)
    assert callable(net.b.construct)
    net.construct(X)
    assert touched(net) == {"a.weight", "a.bias"}


def test_branches_and_later_touches() -> None:
    """A branch taken later joins the live lists in place, at its place."""
    net = Net(lambda self, x, flag: self.b(x) if flag else self.c(x), a=dense, b=dense, c=dense)
    live = net.trainable_params()
    net(X, False)
    assert names(live) == ["c.weight", "c.bias"]
    net(X, True)
    assert list.__len__(live) == 4
    assert names(live) == ["b.weight", "b.bias", "c.weight", "c.bias"]
    assert lazycell.registry(net).untouched == ("a",)


def test_a_branch_that_only_reads_is_seen_in_a_settled_net() -> None:
    """Also when nothing of the net is watched any more but the parameter."""
    net = Net(lambda self, x, flag: x + self.a.weight[0] if flag else x, a=dense)
    net(X, False)
    net(X, False)
    assert not _tracking.is_watched(net) and not touched(net)
    net(X, True)
    assert touched(net) == {"a.weight"}


def test_recursion_and_repeated_calls() -> None:
    """A cell that calls itself, and one that is called twice, are used once."""

    def forward(self, x, depth=2):
        return self(self.a(self.a(x)), depth - 1) if depth else x

    net = Net(forward, a=dense, b=dense)
    net(X)
    assert touched(net) == {"a.weight", "a.bias"}


def test_early_return_and_exception_before_a_layer() -> None:
    """What comes after doesn't count."""

    def forward(self, x, fails):
        x = self.a(x)
        if fails:
            raise KeyError("middle")
        return x

    net = Net(forward, a=dense, b=dense)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(KeyError):
            net(X, True)
    assert touched(net) == {"a.weight", "a.bias"}
    with pytest.warns(lazycell.UnusedLayerWarning, match=r"\bb \(Dense\)"):
        net(X, False)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_exceptions_leave_a_usable_net(error: type[BaseException]) -> None:
    """Whatever is raised in the middle, by whomever, the next call works and gives the eager result."""

    class Fails(nn.Cell):
        fails = True

        def construct(self, x: Tensor) -> Tensor:
            if self.fails:
                raise error("middle")
            return x

    net = Net(lambda self, x: self.b(self.middle(self.a(x))), a=dense, middle=Fails, b=dense)
    for _ in range(2):
        with pytest.raises(error):
            net(X)
        with pytest.raises(error):
            ms.value_and_grad(lambda x: net(x).sum(), None, net.trainable_params())(X)
    net.middle.fails = False
    expected = net.b.construct(net.a.construct(X))
    assert bits(expected) == bits(net(X))
    assert lazycell.registry(net).untouched == ()


class TestContainers:
    """CellList, CellDict, SequentialCell, tuples and lists."""

    def test_cell_list(self) -> None:
        """An index and a slice use what they name; the list counts as used."""
        net = Net(
            lambda self, x: self.blocks[3]([x := block(x) for block in self.blocks[:2]][-1]),
            blocks=lambda: nn.CellList([dense() for _ in range(5)]),
        )
        net(X)
        used = [True, True, True, True, False, False, True, True, False, False]
        assert [_tracking.is_touched(p) for p in net.get_parameters()] == used
        assert lazycell.registry(net).touched == ("blocks", "blocks.0", "blocks.1", "blocks.3")

    def test_cell_dict(self) -> None:
        """One entry of a dictionary."""
        net = Net(
            lambda self, x: self.heads["b"](x), heads=lambda: nn.CellDict(OrderedDict(a=dense(), b=dense()))
        )
        net(X)
        assert lazycell.registry(net).untouched == ("heads.a",)

    def test_sequential(self) -> None:
        """A SequentialCell uses all it holds."""
        net = Net(lambda self, x: self.body(x), body=lambda: nn.SequentialCell(dense(), nn.ReLU(), dense()))
        net(X)
        assert lazycell.registry(net).untouched == ()

    @pytest.mark.parametrize(
        "keep",
        [
            lambda self, a, b: setattr(self, "kept", ParameterTuple((a, b))),
            lambda self, a, b: setattr(self, "kept", [a, b]),
            lambda self, a, b: setattr(self, "kept", (a, b)),
            lambda self, a, b: setattr(self, "kept", {"x": a, "y": [b]}),
            lambda self, a, b: setattr(self, "kept", {"x": {"y": (a, b)}}),
        ],
    )
    def test_parameters_where_a_read_cannot_be_seen(self, keep) -> None:
        """They are touched when their owner is invoked, and stay deferred if it isn't."""

        class Owner(nn.Cell):
            def __init__(self) -> None:
                super().__init__()
                self.a, self.b = None, None
                self.one, self.two = weight("one"), weight("two")
                keep(self, self.one, self.two)
                del self.one, self.two

            def construct(self, x: Tensor) -> Tensor:
                kept = self.kept
                while isinstance(kept, dict):
                    kept = next(iter(kept.values()))
                return x + (kept if isinstance(kept, Parameter) else kept[0])

        net = Net(lambda self, x: self.used(x), used=Owner, dead=Owner)
        net(X)
        assert [_tracking.is_touched(p) for p in _tracking.hidden_parameters(net.used)] == [True, True]
        assert all(type(p)._lazycell_native for p in _tracking.hidden_parameters(net.dead))

    def test_parameters_in_objects_and_closures(self) -> None:
        """A parameter that no cell holds is right wherever it is used."""

        class Helper:
            def __init__(self) -> None:
                self.weight = Parameter(initializer("ones", (2,)), name="helper")

        class Closed(lazycell.LazyCell):
            def __init__(self) -> None:
                super().__init__()
                inner = Parameter(initializer("ones", (2,)), name="closure")
                self.function = lambda x: ops.add(x, inner)
                self.helper = Helper()

            def construct(self, x: Tensor) -> Tensor:
                return ops.mul(self.function(x), self.helper.weight)

        assert Closed()(X).asnumpy().tolist() == [[2.0, 2.0]]

    def test_listing_parameters_in_construct(self) -> None:
        """A forward that goes through its own parameters uses them all."""

        def forward(self, x):
            return x + sum(ops.ReduceSum()(p) for p in self.body.get_parameters())

        net = Net(forward, body=dense, dead=dense)
        net(X)
        assert touched(net) == {"body.weight", "body.bias"}


class TestNesting:
    """LazyCells and plain cells in each other."""

    def test_lazy_in_plain(self) -> None:
        """A plain cell that holds LazyCells: each of these reports for itself."""

        class Plain(nn.Cell):
            def __init__(self) -> None:
                super().__init__()
                self.one = Net(lambda self, x: self.a(x), a=dense, b=dense)
                self.two = Net(lambda self, x: self.a(x), a=dense)

            def construct(self, x: Tensor) -> Tensor:
                return self.one(x)

        net = Plain()
        with pytest.warns(lazycell.UnusedLayerWarning) as caught:
            net(X)
        assert [[layer.name for layer in entry.message.layers] for entry in caught] == [["b"]]
        assert names(lazycell.trainable_params(net)) == ["one.a.weight", "one.a.bias"]
        assert lazycell.registry(net).untouched == ("one.b", "two", "two.a")

    def test_plain_and_lazy_in_lazy(self) -> None:
        """One warning, of the outermost cell, for all below it."""

        class Plain(nn.Cell):
            def __init__(self) -> None:
                super().__init__()
                self.a, self.b = dense(), dense()

            def construct(self, x: Tensor) -> Tensor:
                return self.a(x)

        net = Net(
            lambda self, x: self.inner(self.plain(x)),
            plain=Plain,
            inner=lambda: Net(lambda self, x: self.c(x), c=dense, d=dense),
        )
        with pytest.warns(lazycell.UnusedLayerWarning) as caught:
            net(X)
        assert [[layer.name for layer in entry.message.layers] for entry in caught] == [["plain.b", "inner.d"]]

    def test_shared_by_two_parents(self) -> None:
        """A cell under two parents is one layer, and lists its parameters once."""
        shared = dense()
        net = Net(
            lambda self, x: self.one.layer(x),
            one=lambda: Net(lambda self, x: x, layer=lambda: shared),
            two=lambda: Net(lambda self, x: x, layer=lambda: shared),
        )
        net(X)
        assert len(net.trainable_params()) == 2
        assert lazycell.registry(net).untouched == ()

    def test_wrapper_cells_of_mindspore(self) -> None:
        """A net in a WithLossCell and a TrainOneStepCell is tracked, and trained by what it uses."""
        net = Net(lambda self, x: self.a(x), a=dense, b=dense)
        net(X)
        before = net.b.weight._lazycell_native
        loss = nn.WithLossCell(net, nn.MSELoss())
        step = nn.TrainOneStepCell(loss, nn.Adam(net.trainable_params(), 0.1))
        value = bits(net.a.weight)
        step(X, X)
        assert bits(net.a.weight) != value
        assert net.b.weight._lazycell_native is before and len(deferred(net)) == 2

    def test_copied_in_a_constructor(self) -> None:
        """Layers that a constructor copies are deferred, tracked and warned of like those that it builds."""

        def copies() -> nn.Cell:
            layer = nn.SequentialCell(dense(), nn.ReLU())
            return nn.CellList([copy.deepcopy(layer) for _ in range(3)])

        net = Net(lambda self, x: self.copies[1](x), copies=copies)
        assert len(deferred(net)) == 6
        with pytest.warns(lazycell.UnusedLayerWarning) as caught:
            net(X)
        assert [layer.name for layer in caught[0].message.layers] == ["copies.0", "copies.2"]
        assert touched(net) == {"copies.1.0.weight", "copies.1.0.bias"}

    def test_passed_in_from_outside(self) -> None:
        """A layer built before the net has its values already, and is tracked from then on."""
        body, head = dense(), dense()
        net = Net(lambda self, x: self.body(x), body=lambda: body, head=lambda: head)
        net(X)
        assert lazycell.registry(net).untouched == ("head",)
        assert lazycell.registry(net).layers[1].state is lazycell.LayerState.MATERIALIZED


class TestLateAdditions:
    """Children that come after construction."""

    @pytest.mark.parametrize(
        "add",
        [
            lambda net, layer: setattr(net, "late", layer),
            lambda net, layer: net.insert_child_to_cell("late", layer),
            lambda net, layer: net.blocks.append(layer),
            lambda net, layer: net.blocks.insert(0, layer),
            lambda net, layer: net.blocks.extend([layer]),
            lambda net, layer: net.blocks.__setitem__(0, layer),
            lambda net, layer: net.sequence.append(layer),
            lambda net, layer: net.heads.update({"late": layer}),
        ],
    )
    @pytest.mark.parametrize("ran", [False, True], ids=["before the first call", "after it"])
    def test_are_tracked(self, add, ran: bool) -> None:
        """Whichever way it is added: unused until called, then in every live list."""
        net = Net(
            lambda self, x, *more: [x := layer(x) for layer in (self.a, *more)][-1],
            a=dense,
            blocks=lambda: nn.CellList([dense()]),
            sequence=lambda: nn.SequentialCell(dense()),
            heads=lambda: nn.CellDict({"first": dense()}),
        )
        if ran:
            net(X)
        live = net.trainable_params()
        layer = dense()
        add(net, layer)
        net(X)
        assert layer.weight.name not in names(live)
        net(X, layer)
        ms.value_and_grad(lambda x: net(x, layer).sum(), None, live)(X)
        held = [p is layer.weight for p in list.__iter__(live)]
        assert any(held) and names(live) == names(net.trainable_params())

    def test_built_by_a_lazy_cell_later(self) -> None:
        """A LazyCell that is added later is deferred until it runs."""
        net = Net(lambda self, x: self.late(x) if hasattr(self, "late") else x, a=dense)
        net(X)
        net.late = Net(lambda self, x: self.b(x), b=dense, c=dense)
        assert len(deferred(net.late)) == 4
        net(X)
        assert touched(net) == {"late.b.weight", "late.b.bias"}

    def test_replaced_and_removed(self) -> None:
        """What is no longer there is no longer listed."""
        net = Net(lambda self, x: self.b(self.a(x)), a=dense, b=dense)
        net(X)
        net.a.weight = Parameter(ones(2, 2), name="a.weight")
        assert names(net.trainable_params()) == ["a.bias", "b.weight", "b.bias"]
        net(X)
        assert names(net.trainable_params()) == ["a.weight", "a.bias", "b.weight", "b.bias"]
        del net.b
        assert names(net.trainable_params()) == ["a.weight", "a.bias"]


class TestOddCells:
    """Cells with mechanisms of their own."""

    def test_wrapped_construct(self) -> None:
        """``construct`` taken before the first call and wrapped, as MindSpore's own mixed precision does."""
        net = Net(lambda self, x: self.a(x), a=dense, b=dense)
        inner, outer = net.a.construct, net.construct
        net.a.construct = lambda x: inner(x) * 2
        net.construct = lambda x: outer(x) + 1
        first, second = bits(net(X)), bits(net(X))
        del net.construct, net.a.construct
        assert first == second == bits(net(X) * 2 + 1)
        assert touched(net) == {"a.weight", "a.bias"}
        mixed = ms.amp.auto_mixed_precision(Net(lambda self, x: self.a(x), a=dense), "auto")
        assert mixed(X).shape == (1, 2)

    def test_subclass_of_an_untouched_cells_class(self) -> None:
        """It is a subclass of the real class for all that matters."""
        net = Net(lambda self, x: self.a(x), a=dense)

        class Sub(type(net.a)):
            def construct(self, x: Tensor) -> Tensor:
                return super().construct(x) * 2

        twice = Sub(2, 2)
        assert isinstance(twice, nn.Dense) and twice(X).shape == (1, 2) == twice.construct(X).shape

    def test_own_call(self) -> None:
        """A cell with its own ``__call__`` is in a forward pass while that runs, the first time and later."""

        class Own(nn.Cell):
            def __init__(self) -> None:
                super().__init__()
                self.a, self.b = weight("a"), weight("b")

            def __call__(self, x: Tensor, other: bool = False) -> Tensor:
                return x * (self.b if other else self.a)

        net = Net(lambda self, *args: self.own(*args), own=Own)
        net(X)
        assert touched(net) == {"own.a"}
        net.own(X, True)
        assert touched(net) == {"own.a", "own.b"}

    def test_own_getattr(self) -> None:
        """A cell whose attribute lookup is its own is tracked all the same."""

        class Odd(nn.Cell):
            def __init__(self) -> None:
                super().__init__()
                self.a, self.b = weight("a"), weight("b")

            def __getattr__(self, name: str):
                return super().__getattr__("a" if name == "alias" else name)

            def construct(self, x: Tensor) -> Tensor:
                return x + self.alias

        net = Net(lambda self, x: self.odd(x), odd=Odd)
        net(X)
        assert touched(net) == {"odd.a"}

    def test_own_metaclass_and_init_subclass(self) -> None:
        """A registry of model classes doesn't see lazycell's."""
        made: list[str] = []

        class Meta(type(nn.Cell)):
            def __new__(mcs, name, bases, namespace):
                made.append(name)
                return super().__new__(mcs, name, bases, namespace)

        class Registered(nn.Cell, metaclass=Meta):
            def __init_subclass__(cls, **kwargs) -> None:
                made.append("subclass of " + cls.__base__.__name__)

            def __init__(self) -> None:
                super().__init__()
                self.a = weight("a")

            def construct(self, x: Tensor) -> Tensor:
                return x + self.a

        net = Net(lambda self, x: self.part(x), part=Registered, dead=Registered)
        assert _tracking.is_watched(net.part)
        net(X)
        assert made == ["Registered"] and touched(net) == {"part.a"}

    def test_construct_by_another_name(self) -> None:
        """``construct`` may be an alias, be decorated, or be set on the instance."""

        class Alias(nn.Cell):
            def __init__(self) -> None:
                super().__init__()
                self.a = weight("a")

            def forward(self, x: Tensor) -> Tensor:
                return x + self.a

            construct = forward

        class OnInstance(nn.Cell):
            def __init__(self) -> None:
                super().__init__()
                self.a = weight("a")
                self.construct = self.forward

            def forward(self, x: Tensor) -> Tensor:
                return x + self.a

        net = Net(lambda self, x: self.two(self.one.construct(x)), one=Alias, two=OnInstance, three=Alias)
        net(X)
        assert touched(net) == {"one.a", "two.a"}

    def test_methods_other_than_construct(self) -> None:
        """A net that is only used through methods of its own."""

        class Encoder(lazycell.LazyCell):
            def __init__(self) -> None:
                super().__init__()
                self.a, self.b = dense(), dense()

            def encode(self, x: Tensor) -> Tensor:
                return self.a(x)

        net = Encoder()
        live = net.trainable_params()
        net.encode(X)
        assert names(live) == ["a.weight", "a.bias"]

    def test_recomputed_blocks(self) -> None:
        """Recomputing a block uses what the block uses, and no more."""

        class Block(nn.Cell):
            def __init__(self) -> None:
                super().__init__()
                self.live, self.dead = dense(), dense()

            def construct(self, x: Tensor) -> Tensor:
                return self.live(x)

        def make() -> nn.Cell:
            block = Block()
            block.recompute()
            return block

        net = Net(lambda self, x: self.block(x), block=make)
        for _ in range(2):
            ms.value_and_grad(lambda x: net(x).sum(), None, net.trainable_params())(X)
        assert touched(net) == {"block.live.weight", "block.live.bias"}

    def test_custom_bprop(self) -> None:
        """A cell with its own ``bprop`` gives its own gradient from the first call on."""

        class Doubled(nn.Cell):
            def construct(self, x: Tensor) -> Tensor:
                return x * 2

            def bprop(self, x, out, dout):
                return (dout * 10,)

        net = Net(lambda self, x: self.d(x), d=Doubled)
        assert ms.grad(lambda x: net(x).sum())(X).asnumpy().tolist() == [[10.0, 10.0]]
        assert ms.grad(lambda x: net(x).sum())(X).asnumpy().tolist() == [[10.0, 10.0]]

    def test_reads_while_gradients_are_recorded(self) -> None:
        """A penalty outside any construct takes part in the loss, so its parameter is touched."""
        net = Net(lambda self, x: self.a(x), a=dense, b=dense)
        live = net.trainable_params()

        def loss(x: Tensor) -> Tensor:
            return net(x).sum() + (net.b.weight * 3).sum()

        _, gradients = ms.value_and_grad(loss, None, live)(X)
        assert names(live) == ["a.weight", "a.bias", "b.weight"]
        assert gradients[2].asnumpy().tolist() == [[3.0, 3.0], [3.0, 3.0]]


class Reads(nn.Cell):
    """Reads its parameters, and computes nothing: MindSpore's operators aren't safe in several threads at once."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = weight("a", 5), weight("b", 6)

    def construct(self, x: Tensor) -> Tensor:
        assert self.a is not None and self.b is not None
        return x


class TestThreads:
    """Nets that are built and run at the same time."""

    def test_two_nets(self) -> None:
        """Each thread's net is deferred, touched and warned of by itself."""
        nets: list[Net] = []

        def work() -> None:
            for _ in range(10):
                net = Net(lambda self, x: self.a(x), a=Reads, b=Reads)
                assert len(deferred(net)) == 4
                net(X)
                nets.append(net)

        self.run(work, 4)
        assert len(nets) == 40
        for net in nets:
            assert touched(net) == {"a.a", "a.b"} and deferred(net) == {"b.a", "b.b"}

    def test_plain_nets_beside_a_lazy_one(self) -> None:
        """A thread that builds plain nets gets plain ones while another thread defers."""
        inside, built = threading.Event(), threading.Event()
        plain: list[nn.Cell] = []

        def build_plain() -> None:
            inside.wait(30)
            plain.append(dense())
            built.set()

        def make() -> nn.Cell:
            inside.set()
            assert built.wait(30)
            return dense()

        thread = threading.Thread(target=build_plain)
        thread.start()
        net = Net(lambda self, x: x, a=make)
        thread.join()
        assert not plain[0].weight.has_init and type(plain[0]) is nn.Dense
        assert len(deferred(net)) == 2

    def test_one_net(self) -> None:
        """Threads that run one net for the first time at once: one warning, the eager values, all of them."""
        for _ in range(10):
            eager, net = both(
                lambda base: (Net if base is lazycell.LazyCell else PlainTwin)(
                    lambda self, x: self.body(x), body=lambda: nn.SequentialCell([Reads() for _ in range(20)]), b=Reads
                )
            )
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always", lazycell.LazyCellWarning)
                self.run(lambda net=net: net(X), 4)
            assert [[layer.name for layer in entry.message.layers] for entry in caught] == [["b"]]
            assert len(touched(net)) == 40 and len(net.trainable_params()) == 40
            assert_same_values(eager, net)

    def test_many_cells_at_once(self) -> None:
        """No thread stumbles over another that settles the same cells, nor one that only looks."""
        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-6)
        try:
            for _ in range(10):
                net = Net(
                    lambda self, x: [cell(x) for cell in self.parts],
                    parts=lambda: nn.CellList([Reads() for _ in range(50)]),
                )
                live = net.trainable_params()
                self.run(lambda net=net: (net(X), str(lazycell.registry(net)), list(net.get_parameters())), 4)
                assert len(touched(net)) == 100 and list.__len__(live) == 100
        finally:
            sys.setswitchinterval(interval)

    def run(self, work, count: int) -> None:
        """Run some work in several threads that start together."""
        errors: list[BaseException] = []
        barrier = threading.Barrier(count)

        def guarded() -> None:
            try:
                barrier.wait(30)
                work()
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=guarded) for _ in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not errors
