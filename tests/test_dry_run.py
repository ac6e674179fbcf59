"""Touching without training."""

from __future__ import annotations

import functools
import logging
import os
import subprocess
import sys
from collections import namedtuple
from random import Random

import mindspore as ms
import numpy as np
import pytest
from helpers import assert_same_values, bits, both, deferred, names, ones, stream, touched
from mindspore import Parameter, Tensor, nn, ops
from mindspore.common.initializer import initializer
from strategies import Block, inputs, must_touch
from test_laws import in_both_modes

import lazycell
from lazycell import _mindspore

pytestmark = pytest.mark.filterwarnings("ignore::lazycell.UnusedLayerWarning")

SHAPES_ALONE = pytest.mark.skipif(
    not _mindspore.HAS_META, reason="no meta device before MindSpore 2.9, no safe one before 2.10"
)
MODES = pytest.mark.parametrize("mode", [ms.PYNATIVE_MODE, ms.GRAPH_MODE], ids=["PyNative", "Graph"])


def convolutional(base: type[nn.Cell]) -> nn.Cell:
    """A net with moving statistics, random numbers, a buffer and a dead layer."""

    class Model(base):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.bn, self.drop = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(p=0.5)
            self.head, self.dead = nn.Dense(4, 2), nn.Dense(4, 2)
            self.register_buffer("shift", ops.ones(2))
            self.steps = Parameter(ops.zeros(1), name="steps", requires_grad=False)

        def construct(self, x):
            x = self.drop(self.bn(self.conv(x)))
            return self.head(x.mean((2, 3))) + self.shift

    return Model()


LIVE = ["conv.weight", "bn.gamma", "bn.beta", "head.weight", "head.bias"]


@in_both_modes
def test_touches_what_a_forward_pass_touches(plan: Block, eager: nn.Cell, net: nn.Cell, random: Random) -> None:
    """The set is the oracle's, values are the eager ones, and nothing else has changed."""
    before = stream()
    used = must_touch(eager, plan)
    live = net.trainable_params()
    result = lazycell.dry_run(net, lazycell.spec(2, 4) if random.random() < 0.5 else inputs())
    assert result == lazycell.spec(2, 4)
    assert {p.name for p in eager.get_parameters() if id(p) in used} == touched(net)
    assert not touched(net) & deferred(net)
    assert names(live) == [p.name for p in eager.trainable_params() if id(p) in used]
    assert stream() == before
    assert_same_values(eager, net)


class TestInputs:
    """What goes in, and what comes out."""

    class Structured(lazycell.LazyCell):
        """Takes and gives containers."""

        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.dead = nn.Dense(4, 3), nn.Dense(4, 2), nn.Dense(4, 4)

        def construct(self, pair, options=None, scale=1.0):
            first, second = self.a(pair[0]), self.b(pair[1]["x"])
            if options is not None:
                first = first + options
            return {"first": first * scale, "rest": [second, (second.sum(), 7)]}

    def test_containers_and_keywords(self) -> None:
        """Tensors and specs anywhere; everything else as it is."""
        net = self.Structured()
        pair = (ones(5, 4), {"x": lazycell.spec(None, 4)})
        result = lazycell.dry_run(net, pair, options=lazycell.spec(5, 3), scale=2)
        assert result == {
            "first": lazycell.spec(5, 3),
            "rest": [lazycell.spec(1, 2), (lazycell.spec(), 7)],
        }
        assert names(net.trainable_params()) == ["a.weight", "a.bias", "b.weight", "b.bias"]

    def test_named_tuples(self) -> None:
        """They stay what they are."""
        Out = namedtuple("Out", "x y")

        class Named(lazycell.LazyCell):
            def construct(self, x):
                return Out(x, x.sum())

        assert lazycell.dry_run(Named(), ones(2, 3)) == Out(lazycell.spec(2, 3), lazycell.spec())

    def test_tensors_without_values(self) -> None:
        """A shape with None is taken as 1, and so is what ``set_inputs`` says."""
        shaped = Tensor(shape=[None, 3, 8, None], dtype=ms.float32)
        assert lazycell.dry_run(convolutional(lazycell.LazyCell), shaped) == lazycell.spec(1, 2)
        net = convolutional(lazycell.LazyCell)
        net.set_inputs(shaped)
        assert lazycell.dry_run(net) == lazycell.spec(1, 2)
        assert names(net.trainable_params()) == LIVE

    def test_dtypes(self) -> None:
        """Integer inputs go in as such, and the result says what comes out."""

        class Embeds(lazycell.LazyCell):
            def __init__(self) -> None:
                super().__init__()
                self.table = nn.Embedding(7, 4)

            def construct(self, x):
                return self.table(x).astype(ms.float16)

        result = lazycell.dry_run(Embeds(), lazycell.spec(2, 5, dtype=ms.int32))
        assert result == lazycell.spec(2, 5, 4, dtype=ms.float16)

    def test_spec(self) -> None:
        """What it is, and what it refuses."""
        described = lazycell.spec(None, 3, dtype=ms.int64)
        assert (described.shape, described.dtype) == ((1, 3), ms.int64)
        assert described == lazycell.spec(1, 3, dtype=ms.int64) != lazycell.spec(1, 3)
        with pytest.raises(TypeError, match=r"integers or None, one for each dimension, but got \(1, 3\)"):
            lazycell.spec((1, 3))
        with pytest.raises(TypeError, match="but got 2.5"):
            lazycell.spec(2.5)
        with pytest.raises(ValueError, match="but got -1"):
            lazycell.spec(-1, 3)
        with pytest.raises(TypeError, match="a dtype of MindSpore.*but got 'float32'"):
            lazycell.spec(1, dtype="float32")

    def test_refusals(self) -> None:
        """What is no cell, what isn't tracked, and inputs that don't fit."""
        with pytest.raises(TypeError, match="expected a mindspore.nn.Cell"):
            lazycell.dry_run(print)
        with pytest.raises(lazycell.LazyCellError, match="isn't tracked"):
            lazycell.dry_run(nn.Dense(2, 2), ones(1, 2))
        net = convolutional(lazycell.LazyCell)
        with pytest.raises(Exception) as caught:
            lazycell.dry_run(net, lazycell.spec(1, 5, 8, 8))
        assert not isinstance(caught.value, lazycell.LazyCellError)
        assert lazycell.dry_run(net, lazycell.spec(1, 3, 8, 8)) == lazycell.spec(1, 2)
        with pytest.raises(TypeError):
            lazycell.dry_run(convolutional(lazycell.LazyCell))


class TestRestores:
    """Nothing is left behind but touches."""

    @pytest.mark.parametrize("shapes_alone", [pytest.param(True, marks=SHAPES_ALONE), False], ids=["shapes", "zeros"])
    @MODES
    def test_everything(self, mode: int, shapes_alone: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        """Mode, train flag, random streams, moving statistics, buffers; no hook has run."""
        monkeypatch.setattr(_mindspore, "HAS_META", shapes_alone)
        eager, net = both(convolutional)
        ran: list[str] = []
        for cell in (net, net.bn):
            cell.register_forward_pre_hook(lambda *_: ran.append("pre"))
            cell.register_forward_hook(lambda *_: ran.append("post"))
        net.set_train()
        ms.set_context(mode=mode)
        numpy_stream, generator = stream(), bits(ms.get_rng_state())
        lazycell.dry_run(net, lazycell.spec(4, 3, 8, 8))
        assert ms.get_context("mode") == mode and net.training and net.bn.training
        assert (stream(), bits(ms.get_rng_state())) == (numpy_stream, generator)
        assert not ran
        assert deferred(net) == {"steps", "dead.weight", "dead.bias"}
        assert_same_values(eager, net)
        assert net.shift.asnumpy().tolist() == [1.0, 1.0]
        ms.set_context(mode=ms.PYNATIVE_MODE)
        net(ones(2, 3, 8, 8))
        assert ran == ["pre", "pre", "post", "post"]

    def test_buffers_that_construct_changes(self) -> None:
        """They are put back."""

        class Counts(lazycell.LazyCell):
            def __init__(self) -> None:
                super().__init__()
                self.register_buffer("count", ops.zeros(1))
                self.moved = Parameter(ops.zeros(1), name="moved", requires_grad=False)

            def construct(self, x):
                ops.assign_add(self.moved, ops.ones(1))
                self.count.copy_(self.count + 1)
                return x

        net = Counts()
        for _ in range(2):
            lazycell.dry_run(net, ones(1))
            assert net.count.asnumpy() == 0 and net.moved.asnumpy() == 0
        net(ones(1))
        assert net.count.asnumpy() == 1 and net.moved.asnumpy() == 1

    def test_attributes_and_containers(self) -> None:
        """Caches, running state and counters that construct keeps are as before, whichever way it ran."""

        class Keeps(lazycell.LazyCell):
            def __init__(self, needs_values: bool) -> None:
                super().__init__()
                self.a = nn.Dense(4, 4)
                self.mask, self.state, self.calls = None, ops.zeros(4), 0
                self.cache, self.features = {}, []
                self.needs_values = needs_values

            def construct(self, x):
                if self.mask is None:
                    self.mask = ops.ones(4) * 2
                y = self.a(x) * self.mask
                self.cache["y"] = y
                self.features.append(y)
                self.state = self.state * 0.9 + y.mean(0)
                self.calls += 1
                return y * float(y.sum().asnumpy()) if self.needs_values else y

        for needs_values in (False, True):
            net = Keeps(needs_values)
            for _ in range(2):
                lazycell.dry_run(net, lazycell.spec(2, 4))
                assert (net.mask, net.calls, net.cache, net.features) == (None, 0, {}, [])
                assert net.state.asnumpy().tolist() == [0.0] * 4
            expected = net.a(ones(2, 4)) * 2
            result = net(ones(2, 4))
            assert result.shape == (2, 4) and net.calls == 1
            assert bits(net.cache["y"]) == bits(net.features[0]) == bits(expected)

    def test_parameters_that_construct_rebinds(self) -> None:
        """``set_data`` and ``assign_value`` in construct leave the parameter as it was."""

        class Rebinds(lazycell.LazyCell):
            def __init__(self, method: str) -> None:
                super().__init__()
                self.a, self.method = nn.Dense(4, 4), method
                self.w = Parameter(initializer("ones", (4,)), name="w", requires_grad=False)

            def construct(self, x):
                getattr(self.w, self.method)(self.w * 0.5)
                return self.a(x) * self.w

        for method in ("set_data", "assign_value"):
            net = Rebinds(method)
            lazycell.dry_run(net, lazycell.spec(2, 4))
            assert net.w.asnumpy().tolist() == [1.0] * 4
            net(ones(2, 4))
            assert net.w.asnumpy().tolist() == [0.5] * 4

    def test_after_a_failure(self) -> None:
        """Mode and streams are back after an exception too."""

        class Fails(lazycell.LazyCell):
            def construct(self, x):
                np.random.rand()
                raise KeyError("construct")

        ms.set_context(mode=ms.GRAPH_MODE)
        before = stream()
        with pytest.raises(KeyError):
            lazycell.dry_run(Fails(), ones(1))
        assert ms.get_context("mode") == ms.GRAPH_MODE and stream() == before


SCALE = ms.ops.arange(8).astype(ms.float32)


def helper(x: Tensor) -> Tensor:
    """Uses a global tensor in ways that would crash on the meta device, were it not there itself."""
    return x * SCALE[:4] + SCALE.reshape((2, 4))[1] + ops.split(SCALE, 4)[0].expand_dims(0).sum()


@SHAPES_ALONE
class TestTensorsOutside:
    """Tensors that have values go to the meta device for the time of a dry run, and come back."""

    class Model(lazycell.LazyCell):
        """Uses a closure, a global by a helper, an attribute, an object, and views of a parameter."""

        def __init__(self) -> None:
            super().__init__()
            inner = ops.ones((4, 4))
            self.function = lambda x: x + inner.T[0]
            self.constant = ops.ones((2, 4))
            self.box = type("Box", (), {})()
            self.box.tensor = ops.ones((1, 4))
            self.dense = nn.Dense(4, 4)
            self.weight = Parameter(ops.zeros((2, 4)), name="weight")
            self.view = self.weight.view(8)

        def construct(self, x):
            x = helper(self.function(x)) + self.constant.view(-1)[:4] + self.box.tensor.swapaxes(0, 1)[0]
            return self.dense(x) + self.weight[0] + self.view[4:] + self.dense.weight.T[0]

    def test_are_unharmed(self) -> None:
        """Values, views and training are as without any dry run, however many there were."""
        net = self.Model()
        for _ in range(30):
            assert lazycell.dry_run(net, lazycell.spec(2, 4)) == lazycell.spec(2, 4)
        assert SCALE.asnumpy().tolist() == list(range(8)) and not SCALE.is_meta
        before = bits(net(ones(2, 4)))
        lazycell.dry_run(net, lazycell.spec(16, 4))
        assert bits(net(ones(2, 4))) == before
        ops.assign_add(net.weight, ops.ones((2, 4)))
        assert net.view.asnumpy().tolist() == [1.0] * 8
        live = net.trainable_params()
        _, gradients = ms.value_and_grad(lambda x: net(x).sum(), None, live)(ones(2, 4))
        nn.SGD(list(live), 1.0)(gradients)
        assert not np.array_equal(net.view.asnumpy(), np.ones(8)) and bits(net.view) == bits(net.weight.view(8))


class Namespace:
    """Constants in a class."""

    TENSOR = ms.ops.ones((4, 4))


class Slotted:
    """A tensor in a slot."""

    __slots__ = ("tensor",)

    def __init__(self) -> None:
        self.tensor = ops.ones((4, 4))


@functools.lru_cache
def remembered(size: int) -> Tensor:
    """A result that is kept where nothing can see it."""
    return Tensor(np.tril(np.ones((size, size), np.float32)))


CRASHING = {
    "an item is assigned": lambda self, x: x.__setitem__(0, 1.0),
    "an item of a new tensor is assigned": lambda self, x: ops.zeros((2, 4)).__setitem__(0, 1.0),
    "an item of a parameter is assigned": lambda self, x: self.w.__setitem__(0, 5.0),
    "a constant of a class": lambda self, x: Namespace.TENSOR[:2].swapaxes(0, 1),
    "a constant of a module in a module": lambda self, x: os.path.CONSTANT.swapaxes(0, 1),
    "an object with slots": lambda self, x: self.slotted.tensor[0].expand_dims(0),
    "a property": lambda self, x: self.constant[:2],
    "a remembered result": lambda self, x: remembered(4)[:2].T,
    "a tensor from somewhere": lambda self, x: globals()["SCALE"][:2],
}


@pytest.mark.parametrize("which", CRASHING)
def test_what_would_crash_on_the_meta_device(which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is moved there, or shapes are given up for zeros; nothing of it is changed."""
    monkeypatch.setattr(os.path, "CONSTANT", ops.ones((4, 4)), raising=False)
    remembered(4)
    use = CRASHING[which]

    class Model(lazycell.LazyCell):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.dead = nn.Dense(4, 4), nn.Dense(4, 4)
            self.w = Parameter(initializer("ones", (4,)), name="w", requires_grad=False)
            self.slotted = Slotted()

        @property
        def constant(self) -> Tensor:
            return SCALE.reshape(4, 2)

        def construct(self, x):
            y = self.a(x)
            result = use(self, y)
            return y if result is None else y + result.sum()

    net = Model()
    for _ in range(20):
        assert lazycell.dry_run(net, lazycell.spec(2, 4)) == lazycell.spec(2, 4)
    assert net.w.asnumpy().tolist() == [1.0] * 4 and net(ones(2, 4)).asnumpy().shape == (2, 4)
    for tensor in (SCALE, Namespace.TENSOR, os.path.CONSTANT, net.slotted.tensor, remembered(4)):
        assert np.isfinite((tensor + 1).asnumpy()).all()
    assert "a.weight" in touched(net) and "dead.weight" in deferred(net)


class TestFallback:
    """Where shapes alone don't do, zeros go through, and it is said at debug level."""

    @pytest.mark.parametrize("which", ["an operator without shapes", "a branch on a value", "a value"])
    def test_runs_on_zeros(self, which: str, caplog: pytest.LogCaptureFixture) -> None:
        """The result is the same."""

        class Model(lazycell.LazyCell):
            def __init__(self) -> None:
                super().__init__()
                self.attention, self.a, self.b = nn.MultiheadAttention(4, 2), nn.Dense(4, 4), nn.Dense(4, 4)
                self.dead = nn.Dense(4, 4)

            def construct(self, x):
                if which == "an operator without shapes":
                    return self.attention(x, x, x)[0]
                if which == "a branch on a value":
                    return self.a(x) if x.sum() >= 0 else self.b(x)
                return self.a(x) * float(self.b.bias.asnumpy()[0])

        net = Model()
        with caplog.at_level(logging.DEBUG, logger="lazycell"):
            assert lazycell.dry_run(net, lazycell.spec(5, 2, 4)) == lazycell.spec(5, 2, 4)
        messages = [record.message for record in caplog.records]
        assert len(messages) == _mindspore.HAS_META and all("it runs on zeros" in text for text in messages)
        expected = {
            "an operator without shapes": ("attention.",),
            "a branch on a value": ("a.",),
            "a value": ("a.", "b.bias"),
        }[which]
        assert touched(net) == {p.name for p in net.get_parameters() if p.name.startswith(expected)}
        assert not touched(net) & deferred(net)

    def test_records_no_gradients(self) -> None:
        """A real forward leaves no graph behind."""
        net = convolutional(lazycell.LazyCell)
        lazycell.dry_run(net, ones(1, 3, 8, 8))
        _, gradients = ms.value_and_grad(lambda x: net(x).sum(), None, net.trainable_params())(ones(1, 3, 8, 8))
        assert len(gradients) == len(LIVE)


@MODES
def test_optimizers_built_before_anything_ran(mode: int) -> None:
    """Adam over the live list, in TrainOneStepCell and Model.train, gives the weights of the hand-pruned net."""
    data = [(np.full((2, 3, 8, 8), i / 4, np.float32), np.ones((2, 2), np.float32)) for i in range(4)]
    eager, net = both(convolutional)
    ms.set_context(mode=mode)
    with pytest.warns(lazycell.UnusedLayerWarning) as caught:
        lazycell.dry_run(net, lazycell.spec(2, 3, 8, 8))
    assert [layer.name for layer in caught[0].message.layers] == ["dead"] and caught[0].filename == __file__
    for cell in (eager, net):
        weights = [p for p in cell.trainable_params() if p.name in LIVE]
        step = nn.TrainOneStepCell(nn.WithLossCell(cell, nn.MSELoss()), nn.Adam(weights, 0.01)).set_train(False)
        step(ones(2, 3, 8, 8), ones(2, 2))
        dataset = ms.dataset.GeneratorDataset(data, ["x", "y"], shuffle=False)
        cell.drop = nn.Identity()  # its random numbers are the session's, not the net's
        ms.Model(cell, nn.MSELoss(), nn.Adam(weights, 0.01)).train(1, dataset, dataset_sink_mode=False)
    assert deferred(net) == {"steps", "dead.weight", "dead.bias"}
    assert_same_values(eager, net)


@SHAPES_ALONE
def test_no_activation_memory() -> None:
    """A conv net on an input whose first activation is 2 GB."""
    script = """
import warnings
import psutil
import mindspore as ms
from mindspore import nn
import lazycell
warnings.simplefilter("ignore")

class Net(lazycell.LazyCell):
    def __init__(self):
        super().__init__()
        self.conv, self.bn, self.head, self.dead = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Dense(8, 2), nn.Dense(8, 2)
    def construct(self, x):
        return self.head(self.bn(self.conv(x)).mean((2, 3)))

lazycell.dry_run(Net(), lazycell.spec(1, 3, 8, 8))
before = psutil.Process().memory_info().rss
net = Net()
assert lazycell.dry_run(net, lazycell.spec(256, 3, 512, 512)) == lazycell.spec(256, 2)
assert [p.name for p in net.trainable_params()] == ["conv.weight", "bn.gamma", "bn.beta", "head.weight", "head.bias"]
print((psutil.Process().memory_info().rss - before) / 2**20)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split()[-1]) < 100


def test_after_set_grad() -> None:
    """A gradient that comes later runs the net itself, and a dry run that fails leaves MindSpore as it was."""
    net = lazycell.track(nn.SequentialCell(nn.Dense(3, 3), nn.LayerNorm((3,)), nn.Dense(3, 1)))
    net.set_grad()
    with pytest.raises(ValueError):
        lazycell.dry_run(net, lazycell.spec(2, 5))
    x = ones(2, 3)
    lazycell.dry_run(net, x)
    assert net.requires_grad
    weights = ms.ParameterTuple(net.get_parameters())
    gradients = ms.ops.GradOperation(get_by_list=True)(net, weights)(x)
    plain = ms.grad(lambda x: net(x), None, weights)(x)
    assert [bits(g) for g in gradients] == [bits(g) for g in plain] and gradients[-1].asnumpy().any()
