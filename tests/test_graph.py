"""Graph mode and ``@jit``: the same, where nothing runs in Python."""

from __future__ import annotations

import warnings

import mindspore as ms
import numpy as np
import pytest
from helpers import all_calls, bits, both, deferred, is_deferred, names, ones, touched
from mindspore import Parameter, Tensor, nn, ops
from mindspore.common.initializer import initializer

import lazycell
from lazycell import _reading, _touching, _tracking

pytestmark = pytest.mark.filterwarnings("ignore::lazycell.UnusedLayerWarning")

X = ones(2, 4)


class Recurrent(nn.Cell):
    """Keeps its parameters in tuples."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 4)

    def construct(self, x):
        return self.lstm(x.reshape(1, 2, 4))[0].reshape(2, 4)


def make(base: type[nn.Cell]) -> nn.Cell:
    """A net with all that may be used in part."""

    class Model(base):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Dense(4, 4)
            self.off = nn.Dense(4, 4)
            self.blocks = nn.CellList([nn.Dense(4, 4) for _ in range(5)])
            self.act, self.unused_act = nn.ReLU(), nn.HSwish()
            self.flag = False
            self.embedding = nn.Embedding(4, 4)
            self.dead = nn.Dense(4, 4)
            self.read = Parameter(initializer("normal", (4,)), name="read")
            self.unread = Parameter(initializer("normal", (4,)), name="unread")
            self.recurrent, self.dead_recurrent = Recurrent(), Recurrent()

        def construct(self, x):
            x = self.act(self.a(x))
            if self.flag:
                x = self.off(x)
            for block in self.blocks[:2]:
                x = block(x)
            x = self.recurrent(self.blocks[4](x) + self.read)
            return ops.matmul(x, self.embedding.embedding_table.T)

    return Model()


def used(net: nn.Cell) -> set[str]:
    """The touched parameters by the names they were built with: slices of a CellList rename theirs in PyNative."""
    return {name for name, p in net.parameters_and_names() if _touching.is_touched(p)}


def dead(net: nn.Cell) -> set[str]:
    """The deferred parameters, likewise."""
    return {name for name, p in net.parameters_and_names() if is_deferred(p)}


TOUCHED = {
    "read", "a.weight", "a.bias", "blocks.0.weight", "blocks.0.bias", "blocks.1.weight", "blocks.1.bias",
    "blocks.4.weight", "blocks.4.bias", "embedding.embedding_table", "recurrent.lstm.weight_ih_l0",
    "recurrent.lstm.weight_hh_l0", "recurrent.lstm.bias_ih_l0", "recurrent.lstm.bias_hh_l0",
}  # fmt: skip
UNUSED = ["off", "blocks.2", "blocks.3", "unused_act", "dead", "dead_recurrent"]


class Outer(nn.Cell):
    """A user's own cell around a net."""

    def __init__(self, net: nn.Cell) -> None:
        super().__init__(auto_prefix=False)
        self.net = net

    def construct(self, x):
        return self.net(x) * 1


def run_in_model(net: nn.Cell) -> None:
    """``Model.predict``."""
    ms.Model(net).predict(X)


def run_in_function(net: nn.Cell) -> Tensor:
    """A jitted function."""

    @ms.jit
    def function(x):
        return net(x) * 1

    return function(X)


def run_in_method(net: nn.Cell) -> Tensor:
    """A jitted ``construct``."""

    class Jitted(nn.Cell):
        def __init__(self) -> None:
            super().__init__(auto_prefix=False)
            self.net = net

        @ms.jit
        def construct(self, x):
            return self.net(x) * 1

    return Jitted()(X)


def run_in_gradient(net: nn.Cell) -> None:
    """``ms.grad`` of the inputs."""

    def function(x):
        return net(x).sum()

    ms.grad(function)(X)


WAYS = {
    "the net itself": lambda net: net(X),
    "a cell around it": lambda net: Outer(net)(X),
    "WithLossCell": lambda net: nn.WithLossCell(net, nn.MSELoss())(X, X),
    "WithEvalCell": lambda net: nn.WithEvalCell(net, nn.MSELoss())(X, X),
    "Model.predict": run_in_model,
    "a jitted function": run_in_function,
    "a jitted method": run_in_method,
    "a gradient": run_in_gradient,
    "recompute": lambda net: (net.a.recompute(), net(X)),
    "two phases": lambda net: (net.set_train(), net(X), net.set_train(False), net(X)),
    "two shapes": lambda net: (net(X), Outer(net)(ones(2, 4) * 2)),
    "dynamic shapes": lambda net: (net.set_inputs(Tensor(shape=[2, None], dtype=ms.float32)), net(X)),
}


@pytest.mark.parametrize("mode", [ms.PYNATIVE_MODE, ms.GRAPH_MODE], ids=["PyNative", "Graph"])
@pytest.mark.parametrize("way", WAYS)
def test_the_same_set_whichever_way_it_runs(way: str, mode: int) -> None:
    """Exactly what is used, one warning that names the rest, and no storage for it."""
    net = make(lazycell.LazyCell)
    ms.set_context(mode=mode)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", lazycell.LazyCellWarning)
        WAYS[way](net)
    assert used(net) == TOUCHED
    assert dead(net) == {name for name, _ in net.parameters_and_names()} - TOUCHED
    assert [[layer.name for layer in entry.message.layers] for entry in caught] == [UNUSED]
    assert caught[0].filename == __file__


@pytest.mark.parametrize("mode", [ms.PYNATIVE_MODE, ms.GRAPH_MODE], ids=["PyNative", "Graph"])
def test_training(mode: int) -> None:
    """TrainOneStepCell and Model.train update the used layers as in the eager net, and allocate no dead one."""
    data = [(np.full((2, 4), i, np.float32), np.ones((2, 4), np.float32)) for i in range(4)]
    nets = both(make)
    ms.set_context(mode=mode)
    for net in nets:
        net(X)
        weights = [p for name, p in net.parameters_and_names() if name in TOUCHED]
        dataset = ms.dataset.GeneratorDataset(data, ["x", "y"], shuffle=False)
        step = nn.TrainOneStepCell(nn.WithLossCell(net, nn.MSELoss()), nn.Momentum(weights, 0.1, 0.9))
        step(X, X)
        ms.Model(net, nn.MSELoss(), nn.Adam(weights, 0.01)).train(1, dataset, dataset_sink_mode=False)
    eager, net = nets
    assert used(net) == TOUCHED and len(deferred(net)) == len(list(net.get_parameters())) - len(TOUCHED)
    for one, other in zip(eager.get_parameters(), net.get_parameters(), strict=True):
        assert bits(one) == bits(other), one.name


def test_outputs_and_gradients_are_the_eager_ones() -> None:
    """In Graph mode, with a live list that a first call has filled."""
    eager, net = both(make)
    ms.set_context(mode=ms.GRAPH_MODE)
    live = net.trainable_params()
    assert bits(eager(X)) == bits(net(X))

    def loss(x):
        return net(x).sum()

    def eager_loss(x):
        return eager(x).sum()

    _, gradients = ms.value_and_grad(loss, None, live)(X)
    weights = [p for p in eager.trainable_params() if p.name in TOUCHED]
    _, expected = ms.value_and_grad(eager_loss, None, weights)(X)
    assert names(live) == names(weights)
    assert [bits(g) for g in gradients] == [bits(g) for g in expected]


def test_untouched_error() -> None:
    """Iterating before anything ran would freeze an empty list into a graph."""
    net = make(lazycell.LazyCell)
    ms.set_context(mode=ms.GRAPH_MODE)
    with pytest.raises(lazycell.UntouchedError, match="before any forward pass"):
        list(net.trainable_params())
    with pytest.raises(lazycell.UntouchedError):
        ms.value_and_grad(net, None, net.trainable_params())
    net(X)
    assert len(list(net.trainable_params())) == len(TOUCHED)


def test_a_list_that_was_built_into_a_graph() -> None:
    """A function that its own compilation fills the list of is compiled again, before it runs."""
    net = make(lazycell.LazyCell)
    live = net.trainable_params()

    def loss(x):
        return net(x).sum()

    gradient = ms.value_and_grad(loss, None, live)

    @ms.jit
    def step(x):
        return gradient(x)

    for _ in range(2):
        value, gradients = step(X)
        assert bits(value) == bits(net(X).sum())
        assert [g.shape for g in gradients] == [p.shape for p in live] and len(live) == 14


@pytest.mark.parametrize("mode", [ms.PYNATIVE_MODE, ms.GRAPH_MODE], ids=["a jitted function", "a cell"])
def test_a_branch_that_only_a_thread_of_the_compiler_sees(mode: int) -> None:
    """MindSpore compiles branches in threads without a Python stack; what these resolve has values all the same."""

    class Branch(lazycell.LazyCell):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.dead = nn.Dense(4, 4, "ones", "ones"), nn.Dense(4, 4)

        def construct(self, x):
            y = x
            if x.sum() > 0:
                y = self.a(x)
            return y

    net = Branch()

    @ms.jit
    def run(x):
        y = x
        if x.sum() > 0:
            y = net.a(x)
        return y

    ms.set_context(mode=mode)
    result = net(X) if mode == ms.GRAPH_MODE else run(X)
    assert result.asnumpy().tolist() == [[5.0] * 4] * 2
    assert touched(net) == {"a.weight", "a.bias"} and deferred(net) == {"dead.weight", "dead.bias"}


def test_a_branch_on_a_tensor_keeps_both_sides() -> None:
    """The graph holds both, whichever is taken."""

    class Branches(lazycell.LazyCell):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Dense(4, 4), nn.Dense(4, 4), nn.Dense(4, 4)

        def construct(self, x):
            if x.sum() > 0:
                y = self.a(x)
            else:
                y = self.b(x)
            return y

    net = Branches()
    ms.set_context(mode=ms.GRAPH_MODE)
    net(X)
    assert touched(net) == {"a.weight", "a.bias", "b.weight", "b.bias"}
    expected = ops.matmul(-X, net.b.weight.T) + net.b.bias
    np.testing.assert_allclose(net(-X).asnumpy(), expected.asnumpy(), atol=1e-6)


def test_a_part_that_only_a_later_phase_uses() -> None:
    """Touched sets of several graphs add up."""

    class Phases(lazycell.LazyCell):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.aux, self.dead = nn.Dense(4, 4), nn.Dense(4, 4), nn.Dense(4, 4)

        def construct(self, x):
            x = self.body(x)
            if self.training:
                x = x + self.aux(x)
            return x

    net = Phases()
    ms.set_context(mode=ms.GRAPH_MODE)
    net.set_train(False)
    net(X)
    assert touched(net) == {"body.weight", "body.bias"}
    net.set_train(True)
    net(X)
    assert touched(net) == {"body.weight", "body.bias", "aux.weight", "aux.bias"}
    assert deferred(net) == {"dead.weight", "dead.bias"}


def test_a_compilation_that_fails() -> None:
    """Its error is MindSpore's; nothing is reported, and the net works afterwards."""

    class Fails(lazycell.LazyCell):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.dead = nn.Dense(4, 4, "ones", "zeros"), nn.Dense(4, 4)

        def construct(self, x):
            return self.a(x)

    net = Fails()
    ms.set_context(mode=ms.GRAPH_MODE)
    with warnings.catch_warnings():
        warnings.simplefilter("error", lazycell.LazyCellWarning)
        with pytest.raises(Exception):
            net(ones(2, 3))
    with pytest.warns(lazycell.UnusedLayerWarning):
        assert net(X).asnumpy().tolist() == [[4.0] * 4] * 2
    assert deferred(net) == {"dead.weight", "dead.bias"}


def test_the_user_may_ask_for_all() -> None:
    """``init_parameters_data()`` by the user allocates everything, with the eager values."""
    eager, net = both(make)
    ms.set_context(mode=ms.GRAPH_MODE)
    net(X)
    net.init_parameters_data()
    assert not deferred(net) and touched(net) == TOUCHED
    for one, other in zip(eager.get_parameters(), net.get_parameters(), strict=True):
        assert bits(one) == bits(other)


def test_loaded_parameters_are_touched_by_the_graph() -> None:
    """What has storage already is not touched by that, only by the graph that holds it."""
    net = make(lazycell.LazyCell)
    lazycell.materialize(net)
    ms.set_context(mode=ms.GRAPH_MODE)
    Outer(net)(X)
    assert touched(net) == TOUCHED


def test_parameters_that_no_cell_of_the_graph_holds() -> None:
    """A graph that reaches parameters in other ways has their values."""
    net = make(lazycell.LazyCell)
    inner = lazycell.track(nn.Dense(4, 4, "ones", "zeros"))
    lazycell.release(inner)
    weight = inner._params.get("weight")

    class Elsewhere(nn.Cell):
        def construct(self, x):
            return ops.matmul(x, weight) + inner(x) + net.read

    ms.set_context(mode=ms.GRAPH_MODE)
    expected = 8.0 + net.read.asnumpy()
    np.testing.assert_allclose(Elsewhere()(X).asnumpy(), np.broadcast_to(expected, (2, 4)), rtol=1e-6)


@pytest.mark.parametrize("release", [False, True], ids=["reset", "reset and release"])
@pytest.mark.parametrize("outer", [False, True], ids=["the net itself", "a cell around it"])
def test_graphs_from_before_a_reset(release: bool, outer: bool) -> None:
    """A graph that is still there runs with its values, and counts for the net that is called."""
    net = make(lazycell.LazyCell)
    ms.set_context(mode=ms.GRAPH_MODE)
    run = Outer(net) if outer else net
    before = bits(run(X))
    lazycell.registry(net).reset()
    if release:
        assert lazycell.release(net) == 0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", lazycell.LazyCellWarning)
        assert bits(run(X)) == before
    if not outer:  # nothing of the net is called when a graph around it runs again
        assert touched(net) == TOUCHED and len(net.trainable_params()) == len(TOUCHED)
        assert [[layer.name for layer in entry.message.layers] for entry in caught] == [UNUSED]
    assert not TOUCHED & deferred(net)


class GradientsOf(nn.Cell):
    """A cell that computes the gradients of a net for a list of weights."""

    def __init__(self, net: nn.Cell, weights: list[Parameter]) -> None:
        super().__init__(auto_prefix=False)
        self.net, self.weights = net, weights
        self.gradient = ops.GradOperation(get_by_list=True)

    def construct(self, x):
        return self.gradient(self.net, self.weights)(x)


def test_a_live_list_in_a_cell_that_is_compiled() -> None:
    """Gradients of a list that nothing has filled are refused, each time, until the net has run."""

    net = make(lazycell.LazyCell)
    ms.set_context(mode=ms.GRAPH_MODE)
    step = GradientsOf(net, net.trainable_params())
    for _ in range(2):
        with pytest.raises(lazycell.UntouchedError, match="gradients of nothing"):
            step(X)
    net(X)
    assert len(step(X)) == len(net.trainable_params()) == 14


def test_a_live_list_that_the_compilation_of_a_cell_fills() -> None:
    """A graph holds both sides of a branch on a tensor, of which a call before took one: it is compiled again."""

    class Both(lazycell.LazyCell):
        def __init__(self) -> None:
            super().__init__()
            self.b, self.a = nn.Dense(4, 4), nn.Dense(4, 4)

        def construct(self, x):
            if x.sum() > 0:
                return self.a(x)
            return self.b(x)

    net, x = Both(), ops.ones((2, 4))
    net(x)
    live = net.trainable_params()
    expected = ms.grad(net, None, [net.a.weight, net.a.bias])(x)
    assert names(live) == ["a.weight", "a.bias"]
    ms.set_context(mode=ms.GRAPH_MODE)
    step = GradientsOf(net, live)
    for _ in range(2):
        gradients = step(x)
        assert names(live) == ["b.weight", "b.bias", "a.weight", "a.bias"]
        assert [bits(g) for g in gradients[2:]] == [bits(g) for g in expected]
        assert not any(g.asnumpy().any() for g in gradients[:2])
    lazycell.freeze(net.b)
    assert [bits(g) for g in step(x)] == [bits(g) for g in expected]


def test_a_parameter_that_is_touched_after_a_list_was_built_in() -> None:
    """A compiled gradient function is compiled anew at its next call."""

    class Late(lazycell.LazyCell):
        def __init__(self) -> None:
            super().__init__()
            self.b, self.a = nn.Dense(4, 4), nn.Dense(4, 4)

        def construct(self, x, late=False):
            return self.b(x) if late else self.a(x)

    net = Late()
    net(X)
    live = net.trainable_params()

    def loss(x):
        return net(x).sum()

    gradient = ms.value_and_grad(loss, None, live)

    @ms.jit
    def step(x):
        return gradient(x)

    assert len(step(X)[1]) == 2
    net(X, True)
    assert [g.shape for g in step(X)[1]] == [p.shape for p in live] and len(live) == 4


def compilations(function) -> int:
    """How many graphs MindSpore compiles during a call."""
    try:
        from mindspore.graph.api import _CellGraphExecutor as executor  # MindSpore 2.9 and later
    except ImportError:
        from mindspore.common.api import _CellGraphExecutor as executor
    native, count = executor.compile, []

    def compile(self, *args, **kwargs):
        phase, fresh = native(self, *args, **kwargs)
        count.append(fresh)
        return phase, fresh

    executor.compile = compile
    try:
        function()
    finally:
        executor.compile = native
    return sum(count)


def test_no_compilation_is_added() -> None:
    """As many as with the eager net, in the first call and later."""
    eager, net = both(make)
    ms.set_context(mode=ms.GRAPH_MODE)

    def run(cell: nn.Cell) -> None:
        cell(X)
        cell(X)
        cell(ones(2, 4) * 3)
        cell.set_train(True)
        cell(X)
        Outer(cell)(X)

    assert compilations(lambda: run(eager)) == compilations(lambda: run(net)) > 1


def test_settled_classes_after_a_jitted_function() -> None:
    """What a graph resolved has its own class back, and its mapping is no longer watched for the graph."""
    net = make(lazycell.LazyCell)
    run_in_function(net)
    assert not _tracking.is_watched(net) and not _tracking.is_watched(net.a)
    assert type(net.a._params) is _reading.Parameters


def test_a_steady_call_runs_less_than_the_plain_one() -> None:
    """Once compiled, a call in Graph mode makes fewer Python calls than that of the same net on ``nn.Cell``."""
    nets = both(make)
    ms.set_context(mode=ms.GRAPH_MODE)
    for net in nets:
        net(X), net(X)
    eager, lazy = (all_calls(lambda net=net: net(X)) for net in nets)
    assert 0 < lazy < eager  # MindSpore tells each cell below a plain one what runs
