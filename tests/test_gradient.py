"""Gradients that follow what is used and trainable: equal to MindSpore's bit for bit, whatever is frozen."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from random import Random

import mindspore as ms
import numpy as np
import pytest
from helpers import bits, both, is_deferred, lazycell_calls, names, ones
from hypothesis import given, settings
from hypothesis import strategies as st
from mindspore import Parameter, ParameterTuple, Tensor, mint, nn, ops
from strategies import Block, build, inputs, must_touch, plans

import lazycell
from lazycell import _aligned, _gradient
from lazycell import _mindspore as internals

pytestmark = pytest.mark.filterwarnings("ignore::lazycell.UnusedLayerWarning")

MODES = {"PyNative": ms.PYNATIVE_MODE, "Graph": ms.GRAPH_MODE}


class Branches(lazycell.LazyCell):
    """A trunk, a branch that a flag takes, a head, and a dead layer."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.branch, self.head = nn.Dense(3, 3), nn.Dense(3, 3), nn.Dense(3, 2)
        self.dead = nn.Dense(3, 3)

    def construct(self, x, flag=False):
        h = self.trunk(x)
        if flag:
            h = self.branch(h)
        return self.head(h)


class Participant:
    """Somebody who wants to know what took part."""

    def took_part(self, gradients: lazycell._aligned.Gradients) -> None:
        """Part of the interface."""


@pytest.fixture
def watched() -> object:
    """Which parameters take part is looked at."""
    participant = Participant()
    _aligned.participants.add(participant)
    yield participant
    _aligned.participants.discard(participant)


def as_given(how: str, x: Tensor) -> tuple[tuple, dict]:
    """Arguments for `loss_of`, by position, by name, or within containers."""
    return {
        "position": ((x,), {}),
        "keyword": ((), {"x": x}),
        "tuple": (((x, 2),), {}),
        "list in a dict": (({"x": [x]},), {}),
        "twice": ((x, x), {}),
    }[how]


def loss_of(net: nn.Cell) -> Callable[..., Tensor]:
    """The sum of a net's output, for an input in whichever of these ways."""

    def loss(x, again=None):
        if isinstance(x, dict):
            x = x["x"]
        if isinstance(x, (tuple, list)):
            x = x[0]
        return net(x if again is None else again).sum()

    return loss


def freeze_alike(eager: nn.Cell, net: nn.Cell, random: Random, share: float) -> None:
    """Freeze the same parameters of both, some of them cell by cell."""
    for one, other in zip(eager.cells_and_names(), net.cells_and_names(), strict=True):
        if random.random() < share:
            for parameter in one[1].get_parameters():
                parameter.requires_grad = False
            lazycell.freeze(other[1])


@pytest.mark.parametrize("how", ["position", "keyword", "tuple", "list in a dict", "twice"])
@given(plans(), st.randoms(use_true_random=False), st.sampled_from([0.0, 0.2, 0.5]), st.booleans())
def test_gradients_are_mindspores(how: str, plan: Block, random: Random, share: float, live: bool) -> None:
    """Values, gradients and parameters, for random nets, frozen sets and ways to pass the input."""
    eager, net = both(lambda base: build(plan, base, root=True))
    freeze_alike(eager, net, random, share)
    used = must_touch(eager, plan)
    weights = [p for p in eager.trainable_params() if id(p) in used]
    if not weights:
        with pytest.raises(lazycell.UntouchedError, match="nothing to compute gradients for"):
            lazycell.grad(net, None, net)(inputs())
        return
    args, kwargs = as_given(how, inputs())
    expected = ms.value_and_grad(loss_of(eager), None, weights)(*args, **kwargs)
    if not live:
        net(inputs())
    given_weights = net if live else [p for p in net.get_parameters() if p.name in names(weights)]
    function = lazycell.value_and_grad(loss_of(net), None, given_weights)
    for _ in range(2):
        args, kwargs = as_given(how, inputs())
        value, gradients = function(*args, **kwargs)
        assert bits(expected[0]) == bits(value)
        assert names(weights) == names(gradients.parameters)
        assert [bits(g) for g in expected[1]] == [bits(g) for g in gradients]


@settings(max_examples=max(settings.default.max_examples // 5, 3))
@given(plans(), st.randoms(use_true_random=False))
def test_gradients_in_graph_mode(plan: Block, random: Random) -> None:
    """The same when the function is compiled; a live list that nothing has filled is filled by a dry run."""
    eager, net = both(lambda base: build(plan, base, root=True))
    freeze_alike(eager, net, random, 0.3)
    used = must_touch(eager, plan)
    weights = [p for p in eager.trainable_params() if id(p) in used]
    ms.set_context(mode=ms.GRAPH_MODE)
    function = lazycell.value_and_grad(loss_of(net), None, net)
    if not weights:
        with pytest.raises(lazycell.UntouchedError):
            function(inputs())
        return
    expected = ms.value_and_grad(loss_of(eager), None, weights)(inputs())
    value, gradients = function(inputs())
    assert bits(expected[0]) == bits(value)
    assert names(weights) == names(gradients.parameters)
    assert [bits(g) for g in expected[1]] == [bits(g) for g in gradients]


SIGNATURES = [
    dict(grad_position=None, weights=True),
    dict(grad_position=0, weights=None),
    dict(grad_position=(0, 1), weights=None),
    dict(grad_position=0, weights=True),
    dict(grad_position=(0, 1), weights=True),
    dict(grad_position=None, weights=True, has_aux=True),
    dict(grad_position=1, weights=True, has_aux=True),
    dict(grad_position=None, weights=True, return_ids=True),
    dict(grad_position=0, weights=True, return_ids=True),
    dict(grad_position=None, weights=True, sens_param=True),
]


def same(one: object, other: object) -> None:
    """Two results are equal, bit for bit, container by container."""
    if isinstance(one, Tensor):
        assert bits(one) == bits(other)
    elif isinstance(one, tuple):
        assert isinstance(other, tuple) and len(one) == len(other)
        for a, b in zip(one, other):
            same(a, b)
    else:
        assert one == other


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("options", SIGNATURES, ids=lambda o: ",".join(f"{k}={v}" for k, v in o.items()))
@pytest.mark.parametrize("which", ["grad", "value_and_grad"])
def test_mindspores_signatures(which: str, options: dict, frozen: bool, mode: str) -> None:
    """Each combination of options returns what MindSpore's function returns."""
    if options.get("sens_param") and "sens_param" not in getattr(ms, which).__code__.co_varnames:
        pytest.skip("MindSpore before 2.8 has no sens_param")
    net = Branches()
    net(ones(4, 3), True)
    if frozen:
        lazycell.freeze(net.trunk)
    ms.set_context(mode=MODES[mode])

    def fn(x, y):
        out = net(x) * y
        return (out.sum(), out) if options.get("has_aux") else out

    x, y = ones(4, 3) * 0.3, ones(4, 2) * 0.5
    args = (x, y, y) if options.get("sens_param") else (x, y)
    weights = list(net.trainable_params())
    chosen = options | {"weights": weights if options["weights"] else None}
    expected = getattr(ms, which)(fn, **chosen)(*args)
    same(expected, getattr(lazycell, which)(fn, **chosen)(*args))
    if options["weights"]:
        same(expected, getattr(lazycell, which)(fn, **(chosen | {"weights": net}))(*args))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("weights", ["parameter", "list", "tuple", "ParameterTuple", "live", "cell", "head"])
def test_what_weights_may_be(weights: str, mode: str) -> None:
    """A parameter gives a tensor, all else a tuple that knows its parameters."""
    net = Branches()
    net(ones(4, 3))
    ms.set_context(mode=MODES[mode])
    given = {
        "parameter": net.head.weight,
        "list": [net.head.weight],
        "tuple": (net.head.weight, net.trunk.bias),
        "ParameterTuple": ParameterTuple([net.head.weight]),
        "live": net.trainable_params(),
        "cell": net,
        "head": net.head,
    }[weights]
    gradients = lazycell.grad(lambda_free(net), None, given)(ones(4, 3))
    if weights == "parameter":
        assert isinstance(gradients, Tensor) and not isinstance(gradients, tuple)
    else:
        assert [g.shape for g in gradients] == [p.shape for p in gradients.parameters]
        assert len(gradients) == {"tuple": 2, "live": 4, "cell": 4, "head": 2}.get(weights, 1)


def lambda_free(net: nn.Cell) -> Callable[[Tensor], Tensor]:
    """The sum of a net's output, as a function whose source the compiler can read."""

    def total(x):
        return net(x).sum()

    return total


@pytest.mark.parametrize("mode", MODES)
def test_weights_that_dont_fit(mode: str) -> None:
    """A frozen or a missing weight is an error that names it, before anything runs."""
    net = Branches()
    net(ones(4, 3))
    lazycell.freeze(net.trunk)
    ms.set_context(mode=MODES[mode])
    everything = [net.trunk.weight, net.head.weight]
    with pytest.raises(lazycell.LazyCellError, match="frozen parameters in weights.*trunk.weight.*unfreeze"):
        lazycell.value_and_grad(lambda_free(net), None, everything)(ones(4, 3))
    with pytest.raises(lazycell.LazyCellError, match="weights is empty"):
        lazycell.grad(lambda_free(net), None, [])(ones(4, 3))
    lazycell.freeze(net)
    with pytest.raises(lazycell.UntouchedError, match="every parameter that was touched is frozen"):
        lazycell.grad(lambda_free(net), None, net)(ones(4, 3))
    with pytest.raises(lazycell.UntouchedError, match="has touched no parameter"):
        lazycell.grad(lambda_free(net), None, Branches())(ones(4, 3))
    with pytest.raises(TypeError, match="a live list, a cell, a parameter, or a list of parameters, but is int"):
        lazycell.grad(net, None, 3)
    with pytest.raises(ValueError, match="can not be None at the same time"):
        lazycell.grad(net, None)
    with pytest.raises(ValueError):
        lazycell.grad(net, -1)


@pytest.mark.parametrize("mode", MODES)
def test_a_live_list_grows_with_the_branches_taken(mode: str, watched: object) -> None:
    """The first call that takes a branch has its gradients, already in that call."""
    net = Branches()
    ms.set_context(mode=MODES[mode])

    def loss(x, flag):
        return net(x, flag).sum()

    function = lazycell.value_and_grad(loss, None, net.trainable_params())
    without = ["trunk.weight", "trunk.bias", "head.weight", "head.bias"]
    everything = ["trunk.weight", "trunk.bias", "branch.weight", "branch.bias", "head.weight", "head.bias"]
    for flag, expected in ((False, without), (True, everything), (False, everything), (True, everything)):
        value, gradients = function(ones(4, 3), flag)
        assert names(gradients.parameters) == expected
        assert bits(value) == bits(loss(ones(4, 3), flag))
        native = ms.grad(loss, None, list(gradients.parameters))(ones(4, 3), flag)
        assert [bits(g) for g in native] == [bits(g) for g in gradients]
    assert is_deferred(net.dead.weight)


def test_what_took_part(watched: object) -> None:
    """A gradient that arrived counts, also if it is zero; one that MindSpore made up of zeros doesn't."""
    net = Branches()
    net(ones(4, 3), True)

    def active(fn: Callable[[Tensor], Tensor], weights: object = net) -> set[str]:
        gradients = lazycell.grad(fn, None, weights)(ones(4, 3))
        return {p.name for p, a in zip(gradients.parameters, gradients.active) if a}

    head, trunk, branch = ({f"{n}.weight", f"{n}.bias"} for n in ("head", "trunk", "branch"))
    assert active(lambda x: net(x).sum()) == head | trunk
    assert active(lambda x: net(x, True).sum()) == head | trunk | branch
    assert active(lambda x: (net(x, True) * 0).sum()) == head | trunk | branch
    assert active(lambda x: net.head(ops.stop_gradient(net.trunk(x))).sum()) == head
    assert active(lambda x: net.head(x).sum() + ops.stop_gradient(net.branch(x)).sum()) == head
    assert active(lambda x: (net.head(x) ** 2).sum(), [net.dead.weight, net.head.weight]) == {"head.weight"}
    lazycell.freeze(net.trunk)
    assert active(lambda x: net(x).sum()) == head


def test_watching_who_takes_part_compiles_nothing_anew(watched: object) -> None:
    """Hooks on parameters make older MindSpore compile every graph again; lazycell's own don't."""
    net = Branches()
    net(ones(4, 3))
    function = lazycell.grad(lambda_free(net), None, net)

    @ms.jit
    def jitted(x):
        return net(x) * 2

    jitted(ones(4, 3))
    before = set(internals._versions.api.ms_compile_cache)
    for _ in range(3):
        function(ones(4, 3))
        jitted(ones(4, 3))
    assert set(internals._versions.api.ms_compile_cache) == before
    assert not any(parameter.hooks() for parameter in net.get_parameters())


def test_what_took_part_in_graph_mode(watched: object) -> None:
    """What is in the graph of the function, whichever graph runs."""
    net = Branches()
    ms.set_context(mode=ms.GRAPH_MODE)

    def loss(x, flag):
        return net(x, flag).sum(), x

    function = lazycell.value_and_grad(loss, None, net, has_aux=True)
    for flag in (False, True, False, True, False):
        _, gradients = function(ones(4, 3), flag)
        took = {p.name for p, a in zip(gradients.parameters, gradients.active) if a}
        assert {name.split(".")[0] for name in took} == {"trunk", "head"} | ({"branch"} if flag else set())
    assert len(gradients) == 6


@pytest.mark.parametrize("inner", ["jit", "recompute", "to_float", "hooks", "bprop"])
def test_what_took_part_through_cells_of_other_kinds(inner: str, watched: object) -> None:
    """MindSpore records these in ways of their own."""

    class Jitted(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.dense, self.unused = nn.Dense(3, 3), nn.Dense(3, 3)

        @ms.jit
        def construct(self, x):
            return self.dense(x) * 2

    class Own(Jitted):
        def construct(self, x):
            return self.dense(x) * 2

        def bprop(self, x, out, dout):
            return (dout * 2,)

    class Net(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.inner, self.last = nn.Dense(3, 3), Own() if inner == "bprop" else Jitted(), nn.Dense(3, 3)

        def construct(self, x):
            return self.last(self.inner(self.first(x)))

    net = Net()
    if inner == "recompute":
        net.last.recompute()
    elif inner == "to_float":
        net.last.to_float(ms.float16)
    elif inner == "hooks":
        net.last.register_backward_hook(lambda cell, grad_in, grad_out: None)
    for frozen in (False, True):
        if frozen:
            lazycell.freeze(net.first)
        weights = list(net.trainable_params())
        expected = ms.grad(net, None, weights)(ones(4, 3))
        gradients = lazycell.grad(net, None, weights)(ones(4, 3))
        assert [bits(g) for g in expected] == [bits(g) for g in gradients]
        took = {p.name for p, a in zip(gradients.parameters, gradients.active) if a}
        unused = {"inner.unused.weight", "inner.unused.bias"}
        cut = {"inner.dense.weight", "inner.dense.bias"} if inner == "bprop" else set()
        assert took == set(names(weights)) - unused - cut


def recorded(tensor: Tensor) -> bool:
    """Whether MindSpore records what is computed from a tensor."""
    return tensor._requires_grad


class Seeing(lazycell.LazyCell):
    """Keeps what its layers hand on, to see whether it was recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Dense(3, 3), nn.Dense(3, 3), nn.Dense(3, 3)

    def construct(self, x):
        self.between = [self.first(x)]
        self.between.append(self.second(self.between[0]))
        return self.third(self.between[1]).sum()


def test_what_precedes_the_first_trainable_layer_is_not_recorded() -> None:
    """Frozen leading layers cost a forward pass; with nothing frozen, MindSpore is left to itself."""
    net = Seeing()
    function = lazycell.value_and_grad(net, None, net)
    function(ones(4, 3))
    assert [recorded(h) for h in net.between] == [True, True]
    lazycell.freeze(net.second)
    function(ones(4, 3))
    assert [recorded(h) for h in net.between] == [True, True]
    lazycell.freeze(net.first)
    function(ones(4, 3))
    assert [recorded(h) for h in net.between] == [False, False]
    lazycell.unfreeze(net.second)
    function(ones(4, 3))
    assert [recorded(h) for h in net.between] == [False, True]


def test_tensors_that_were_passed_before() -> None:
    """What MindSpore flags for good doesn't cost later, and is found flagged again."""
    net = Seeing()
    lazycell.freeze(net.first, net.second)
    x, fresh = ones(4, 3), ones(4, 3)
    ms.grad(lambda x: net.third(x).sum(), None, [net.third.weight])(x)
    assert recorded(x)
    for how in ("position", "tuple", "keyword"):
        args, kwargs = as_given(how, x)
        lazycell.grad(loss_of(net), None, net)(*args, **kwargs)
        assert recorded(x) and not recorded(net.between[1])
    lazycell.grad(loss_of(net), None, net)({"x": [x]})  # a list that the function may want to change is left alone
    assert recorded(net.between[1])
    lazycell.grad(net, None, net)(fresh)
    assert not recorded(fresh)


@pytest.mark.parametrize("inner", ["grad", "value_and_grad", "vjp", "lazycell"])
@pytest.mark.parametrize("how", ["position", "tuple", "keyword", "list in a dict"])
def test_gradients_of_inputs_within_the_function(how: str, inner: str) -> None:
    """A penalty on the gradient of an input: right at the first call, at later ones, and of tensors used before."""
    net = Seeing()
    net(ones(4, 3))
    lazycell.freeze(net.first)
    weights = list(net.trainable_params())
    x, used = ones(4, 3) * 0.3, ones(4, 3) * 0.3
    ms.grad(lambda z: net(z))(used)

    def of_input(z):
        def squared(z):
            return (net(z) ** 2).sum()

        if inner == "vjp":
            return ms.vjp(squared, z)[1](Tensor(1.0, ms.float32))[0]
        if inner == "value_and_grad":
            return ms.value_and_grad(squared)(z)[1]
        return (lazycell if inner == "lazycell" else ms).grad(squared)(z)

    def penalty(x):
        while not isinstance(x, Tensor):
            x = x["x"] if isinstance(x, dict) else x[0]
        return (of_input(x) ** 2).sum()

    expected = None
    for tensor in (x, x, used, used):
        args, kwargs = as_given(how, tensor)
        result = lazycell.value_and_grad(penalty, None, weights)(*args, **kwargs)
        args, kwargs = as_given(how, ones(4, 3) * 0.3)
        expected = ms.value_and_grad(penalty, None, weights)(*args, **kwargs)
        assert np.abs(result[0].asnumpy()) > 0
        same_arrays(expected, result)


def test_inside_a_cell_that_set_grad_records() -> None:
    """Its recording counts as that of a function: nothing is pruned in it, and an error in it doesn't end it."""
    net = Seeing()
    net(ones(4, 3))
    lazycell.freeze(net.first)
    weights = list(net.trainable_params())

    class Outer(nn.Cell):
        def __init__(self, source: object) -> None:
            super().__init__()
            self.net, self.source = net, source

        def construct(self, x):
            def inner(z):
                return (net(z) ** 2).sum()

            return (self.source.grad(inner, None, weights)(x)[0] ** 2).sum()

    results = []
    for source in (ms, lazycell):
        outer, x = Outer(source), ones(4, 3) * 0.3
        outer.set_grad()
        outer(x)
        results.append(ms.grad(outer, 0)(x))
    assert np.abs(results[0].asnumpy()).max() > 0
    same_arrays(*results)


def test_a_list_of_weights_is_the_callers() -> None:
    """What is added to it later counts, as in MindSpore."""
    net = Seeing()
    net(ones(4, 3))
    for mode in MODES.values():
        ms.set_context(mode=mode)
        weights: list[Parameter] = []
        function = lazycell.grad(lambda_free(net.third), None, weights)
        with pytest.raises(lazycell.LazyCellError, match="weights is empty"):
            function(ones(4, 3))
        for parameter in (net.third.weight, net.third.bias):
            weights.append(parameter)
            gradients = function(ones(4, 3))
            assert names(gradients.parameters) == names(weights)
            assert [g.shape for g in gradients] == [p.shape for p in weights]
    for wrong in ([None], [ones(1)]):
        with pytest.raises(TypeError, match="a list of parameters, but is a list with a"):
            lazycell.grad(net, None, wrong)(ones(4, 3))


@pytest.mark.parametrize("mode", MODES)
def test_a_plain_cell_as_weights(mode: str) -> None:
    """All that is trainable in it counts, also what is put there later, of which it doesn't tell."""

    class Plain(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Dense(3, 3), nn.Dense(3, 2)

        def construct(self, x):
            return self.head(self.body(x))

    net = Plain()
    ms.set_context(mode=MODES[mode])
    function = lazycell.grad(lambda_free(net), None, net)
    assert names(function(ones(4, 3)).parameters) == names(net.trainable_params())
    if mode == "PyNative":
        net.head = nn.Dense(3, 5)
        gradients = function(ones(4, 3))
        assert gradients.parameters[2] is net.head.weight and np.abs(gradients[2].asnumpy()).max() > 0
    net.body.weight.requires_grad = False
    assert len(lazycell.grad(lambda_free(net), None, net)(ones(4, 3))) == 3


@pytest.mark.parametrize("error", ["in the function", "in a hook", "everything is frozen"])
def test_errors_while_it_is_watched_who_takes_part(error: str, watched: object) -> None:
    """They come out as they are, and nothing of lazycell stays on the parameters' side of the next step."""
    net = Seeing()
    net(ones(4, 3))

    def failing(x):
        h = net.second(x)
        if error == "in the function":
            raise ValueError("mine")

        def hook(gradient):
            raise ValueError("mine")

        h.register_hook(hook)
        return net.third(h).sum()

    weights = list(net.trainable_params())
    if error == "everything is frozen":
        lazycell.freeze(net)
        with pytest.raises(lazycell.UntouchedError, match="is frozen"):
            lazycell.grad(lambda_free(net.third), None, net)(ones(4, 3))
        return
    for _ in range(3):
        with pytest.raises(ValueError, match="mine"):
            lazycell.grad(failing, None, weights)(ones(4, 3))
    gradients = lazycell.grad(lambda_free(net.third), None, weights)(ones(4, 3))
    assert [a for p, a in zip(gradients.parameters, gradients.active)] == [False] * 4 + [True] * 2
    expected = ms.grad(lambda_free(net.third), None, weights)(ones(4, 3))
    same(tuple(expected), tuple(gradients))


@pytest.mark.parametrize("mode", MODES)
def test_freezing_a_weight_that_a_graph_holds(mode: str) -> None:
    """A compiled function that holds it in a plain list refuses it at its next call."""
    net = Branches()
    net(ones(4, 3))
    ms.set_context(mode=MODES[mode])
    function = lazycell.grad(lambda_free(net), None, [net.trunk.weight, net.head.weight])

    @ms.jit
    def step(x):
        return function(x)

    assert len(step(ones(4, 3))) == 2
    lazycell.freeze(net.trunk)
    with pytest.raises(lazycell.LazyCellError, match="frozen parameters in weights.*trunk.weight"):
        step(ones(4, 3))
    lazycell.unfreeze(net.trunk)
    assert len(step(ones(4, 3))) == 2


def test_a_step_costs_no_calls_for_each_layer() -> None:
    """What is asked at every step is asked of all parameters at once."""

    counts = []
    for layers in (3, 60):
        net = lazycell.track(nn.SequentialCell([nn.Dense(3, 3) for _ in range(layers)]))
        x = ones(2, 3)
        for weights in (list(net.trainable_params()), net):
            function = lazycell.grad(lambda_free(net), None, weights)
            for _ in range(2):  # of the first step it is noted, for each parameter, whether a gradient arrived
                function(x)
            counts.append(lazycell_calls(lambda function=function, x=x: function(x), with_guard=False))
    assert counts[2] <= counts[0] + 3 and counts[3] <= counts[1] + 3


def test_arguments_that_must_be_seen() -> None:
    """Parameters, tensors with hooks and tensors out of other gradient functions go the way MindSpore takes them."""
    net = Seeing()
    net(ones(4, 3))
    lazycell.freeze(net.first, net.second)
    parameter = Parameter(Tensor(np.ones((4, 3), np.float32)), name="given")
    weights = [parameter, net.third.weight]
    expected = ms.grad(lambda x: net(x), None, weights)(parameter)
    assert [bits(g) for g in lazycell.grad(net, None, weights)(parameter)] == [bits(g) for g in expected]
    assert np.abs(expected[0].asnumpy()).max() > 0
    kept: list[Tensor] = []

    def keeping(x):
        kept.append(net.first(x) * net.third(x))
        return kept[-1].sum()

    for source in (ms.grad, lazycell.grad):
        source(keeping, None, [net.third.weight])(ones(4, 3))
        with pytest.raises(RuntimeError, match="backward the graph twice"):
            source(net, None, [net.third.weight])(kept[-1])
        internals._versions.api._pynative_executor.clear_res()


@pytest.mark.parametrize("where", ["cell", "tensor", "input"])
def test_hooks_on_frozen_layers(where: str) -> None:
    """They are called when MindSpore calls them, and don't fail otherwise."""
    calls: list[str] = []

    def note(gradient: Tensor) -> Tensor:
        calls.append("called")
        return gradient

    class Hooked(lazycell.LazyCell):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Dense(3, 3), nn.Dense(3, 3)

        def construct(self, x):
            if where == "input":
                x.register_hook(note)
            h = self.first(x)
            if where == "tensor":
                h.register_hook(note)
            return self.second(h).sum()

    net = Hooked()
    net(ones(4, 3)) if where == "cell" else None
    if where == "cell":
        net.first.register_backward_hook(lambda cell, grad_in, grad_out: calls.append("called"))
    lazycell.freeze(net.first)
    weights = [net.second.weight, net.second.bias]
    expected = ms.grad(net, None, weights)(ones(4, 3))
    called = len(calls)
    gradients = lazycell.grad(net, None, weights)(ones(4, 3))
    assert len(calls) == 2 * called
    assert [bits(g) for g in gradients] == [bits(g) for g in expected]
    assert Tensor.register_hook is internals._recording._register_hook


def test_inside_other_differentiated_functions() -> None:
    """Higher order, vjp and jvp: nothing is pruned there, and numbers are MindSpore's."""
    net = Seeing()
    net(ones(4, 3))
    lazycell.freeze(net.first)
    weights = list(net.trainable_params())
    x = ones(4, 3) * 0.7

    def penalty(x, source):
        gradients = source(lambda z: (net(z * z) ** 2).sum(), None, weights)(x)
        return sum((g * g).sum() for g in gradients)

    for outer in (
        lambda source: ms.grad(lambda x: penalty(x, source), None, weights)(x),
        lambda source: ms.grad(lambda x: penalty(x, source))(x),
        lambda source: ms.vjp(lambda x: penalty(x, source), x)[1](ones(1).sum()),
        lambda source: ms.jvp(lambda x: penalty(x, source), x, ones(4, 3)),
        lambda source: source(ms.grad(lambda z: (z**3).sum()))(x) if source is ms.grad else x * 6,
    ):
        try:
            expected = outer(ms.grad)
        except Exception as error:  # MindSpore can't do it, so there is nothing to compare with
            with pytest.raises(type(error)):
                outer(lazycell.grad)
            continue
        same_arrays(expected, outer(lazycell.grad))


def same_arrays(one: object, other: object) -> None:
    """Tensors within results are equal."""
    if isinstance(one, Tensor):
        assert np.allclose(one.asnumpy(), other.asnumpy(), rtol=1e-6)
    else:
        for a, b in zip(one, other, strict=True):
            same_arrays(a, b)


def test_an_exception_in_the_forward_pass() -> None:
    """Recording stops, and what follows is as if nothing had happened; MindSpore goes on recording."""
    net = Seeing()
    net(ones(4, 3))
    lazycell.freeze(net.first)
    expected = lazycell.grad(net, None, net)(ones(4, 3))
    executor = internals._versions.api._pynative_executor

    def failing(x):
        net(x)
        raise KeyError("mine")

    for frozen in (True, False):
        with pytest.raises(KeyError, match="mine"):
            lazycell.grad(failing, None, [net.third.weight])(ones(4, 3))
        assert not executor.grad_flag()
        lazycell.grad(net, None, net)(ones(4, 3))
        assert not executor.grad_flag()
        if frozen:
            assert [bits(g) for g in expected] == [bits(g) for g in lazycell.grad(net, None, net)(ones(4, 3))]
            lazycell.unfreeze(net)


def test_a_forward_pass_that_set_grad_has_recorded() -> None:
    """MindSpore takes the one that has run, where it does; so does this."""
    runs = []

    class Counting(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.dense = nn.Dense(3, 3)

        def construct(self, x):
            runs.append(1)
            return self.dense(x).sum()

    counts = []
    for source in (ms.grad, lazycell.grad):
        runs.clear()
        net = Counting()
        net.set_grad()
        weights, x = list(net.trainable_params()), ones(4, 3)
        net(x)
        gradients = source(net, None, weights)(x)
        counts.append(len(runs))
        assert np.abs(gradients[0].asnumpy()).max() > 0
    assert counts[0] == counts[1]


@pytest.mark.parametrize("mode", MODES)
def test_inside_a_jitted_function(mode: str) -> None:
    """A gradient function can be called in a graph, and be decorated itself."""
    net = Branches()
    net(ones(4, 3))
    lazycell.freeze(net.trunk)

    def loss(x):
        return net(x).sum()

    function = lazycell.value_and_grad(loss, None, net)
    expected = ms.value_and_grad(loss, None, list(net.trainable_params()))(ones(4, 3))
    ms.set_context(mode=MODES[mode])

    @ms.jit
    def step(x):
        value, gradients = function(x)
        return value, gradients

    for jitted in (step, ms.jit(function)):
        value, gradients = jitted(ones(4, 3))
        assert bits(value) == bits(expected[0])
        assert [bits(g) for g in gradients] == [bits(g) for g in expected[1]]
    lazycell.unfreeze(net)
    assert len(step(ones(4, 3))[1]) == 4
    with pytest.raises(lazycell.LazyCellError, match="frozen"):
        lazycell.freeze(net.head)
        frozen = lazycell.grad(loss, None, [net.head.weight])

        @ms.jit
        def refused(x):
            return frozen(x)

        refused(ones(4, 3))


@pytest.mark.parametrize("mode", MODES)
def test_freezing_between_steps(mode: str) -> None:
    """It takes effect at the next step."""
    net = Branches()
    ms.set_context(mode=MODES[mode])
    function = lazycell.value_and_grad(lambda_free(net), None, net)
    assert len(function(ones(4, 3))[1]) == 4
    lazycell.freeze(net.trunk)
    assert names(function(ones(4, 3))[1].parameters) == ["head.weight", "head.bias"]
    lazycell.unfreeze(net.trunk)
    lazycell.freeze(net, "*.bias")
    assert names(function(ones(4, 3))[1].parameters) == ["trunk.weight", "head.weight"]


def test_a_failure_of_mindspores_gradients_before_graphs() -> None:
    """What it leaves on doesn't reach graphs, which hold as many gradients as are used by now."""

    def fails(x: Tensor) -> Tensor:
        raise ValueError("middle")

    class Flagged(lazycell.LazyCell):
        def __init__(self) -> None:
            super().__init__()
            self.always = nn.Dense(3, 3)
            self.branch = nn.Dense(3, 3)

        def construct(self, x: Tensor, flag: bool) -> Tensor:
            x = self.always(x)
            if flag:
                x = self.branch(x)
            return x

    net = Flagged()
    with pytest.raises(ValueError, match="middle"):
        ms.value_and_grad(fails, None, list(net.get_parameters()))(ones(2, 3))
    ms.set_context(mode=ms.GRAPH_MODE)
    grad_fn = lazycell.grad(net, None, net.trainable_params())
    assert [len(grad_fn(ones(2, 3), flag)) for flag in (False, True, False)] == [2, 4, 4]


def test_keywords_in_graph_mode() -> None:
    """MindSpore's functions refuse keywords there; these put them in their places."""
    net = Branches()
    net(ones(4, 3), True)
    ms.set_context(mode=ms.GRAPH_MODE)

    def loss(x, flag=False, *, scale=2):
        return net(x, flag).sum() * scale

    def simple(x, flag=False):
        return net(x, flag).sum()

    expected = ms.grad(simple, None, list(net.trainable_params()))(ones(4, 3), True)
    assert [bits(g) for g in lazycell.grad(simple, None, net)(flag=True, x=ones(4, 3))] == [bits(g) for g in expected]
    with pytest.raises(TypeError, match="keyword-only arguments in Graph mode: scale"):
        lazycell.grad(loss, None, net)(ones(4, 3), scale=3)


class TestGradients:
    """The tuple that knows its parameters."""

    def made(self, flag: bool = False) -> lazycell._aligned.Gradients:
        """Gradients of a net with branches."""
        self.net = getattr(self, "net", None) or Branches()
        return lazycell.grad(lambda x: self.net(x, flag).sum(), None, self.net)(ones(4, 3))

    def test_is_a_tuple(self) -> None:
        """It can be zipped, clipped and passed on like MindSpore's."""
        gradients = self.made()
        assert isinstance(gradients, tuple) and type(gradients[:2]) is tuple
        clipped = gradients.replace(ops.clip_by_global_norm(gradients, 0.1))
        assert clipped.parameters == gradients.parameters
        with pytest.raises(lazycell.LazyCellError, match="2 gradients were given for 4 parameters"):
            gradients.replace(gradients[:2])
        copied = copy.deepcopy(gradients)
        assert copied.parameters[0] is gradients.parameters[0] and bits(copied[0]) == bits(gradients[0])

    def test_add(self, watched: object) -> None:
        """Steps with other active branches add up, parameter by parameter."""
        one, two = self.made(), self.made(flag=True)
        three = self.made()
        total = one.add(two).add(three)
        assert sorted(names(total.parameters)) == sorted(names(two.parameters)) and all(total.active)
        by_name = {p.name: g for p, g in zip(total.parameters, total)}
        for gradients in (one, two, three):
            for parameter, gradient in zip(gradients.parameters, gradients):
                by_name[parameter.name] = by_name[parameter.name] - gradient
        assert all(np.allclose(rest.asnumpy(), 0, atol=1e-5) for rest in by_name.values())
        assert [a for p, a in zip(three.parameters, three.active) if p.name.startswith("branch")] == [False, False]


def test_nothing_frozen_is_a_plain_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """The arguments go to MindSpore as they are."""
    seen = []
    native = _gradient.NATIVE_VALUE_AND_GRAD

    def spying(fn, **options):
        def call(*args, **kwargs):
            seen.append(args)
            return native(fn, **options)(*args, **kwargs)

        return call

    monkeypatch.setattr(_gradient, "NATIVE_VALUE_AND_GRAD", spying)
    net = nn.SequentialCell(nn.Dense(3, 3), nn.BatchNorm1d(3), nn.Dense(3, 3))
    weights, x = list(net.trainable_params()), ones(4, 3)
    lazycell.value_and_grad(lambda_free(net), None, weights)(x)
    assert seen == [(x,)]
    lazycell.freeze(net[0])
    lazycell.value_and_grad(lambda_free(net), None, list(net.trainable_params()))(x)
    assert seen == [(x,), ()]


def test_unrelated_parameters_stay_deferred() -> None:
    """A weight that the function doesn't use, given by name, has a gradient of zeros; others are left alone."""
    net = Branches()
    net(ones(4, 3))
    weights = [net.head.weight, net.dead.weight]
    gradients = lazycell.grad(lambda_free(net), None, weights)(ones(4, 3))
    assert [g.shape for g in gradients] == [p.shape for p in weights]
    assert not np.any(gradients[1].asnumpy())
    assert is_deferred(net.dead.bias)


def test_no_warning_of_its_own() -> None:
    """The usual loop with a list that is still empty says nothing."""
    net = Branches()
    with warnings.catch_warnings():
        warnings.simplefilter("error", lazycell.UntouchedWarning)
        lazycell.value_and_grad(lambda_free(net), None, net.trainable_params())(ones(4, 3))


def test_mint_layers() -> None:
    """Layers of mint are pruned and differentiated alike."""
    net = nn.SequentialCell(mint.nn.Linear(3, 3), mint.nn.ReLU(), mint.nn.Linear(3, 2))
    lazycell.freeze(net[0])
    weights = list(net.trainable_params())
    expected = ms.grad(lambda_free(net), None, weights)(ones(4, 3))
    assert [bits(g) for g in lazycell.grad(lambda_free(net), None, weights)(ones(4, 3))] == [bits(g) for g in expected]
