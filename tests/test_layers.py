"""Layers that infer their size: waiting for it, getting it, and being the eager layer afterwards."""

from __future__ import annotations

import copy
import gc
import math
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import mindspore as ms
import numpy as np
import pytest
from helpers import assert_same_values, bits, deferred, lazycell_calls, names, ones, seed, stream, touched
from hypothesis import given
from hypothesis import strategies as st
from mindspore import Parameter, ParameterTuple, Tensor, amp, nn, ops
from mindspore.common.initializer import Initializer, Normal, initializer

import lazycell
from lazycell import _dry_run
from lazycell import _mindspore as internals
from lazycell import _sizing, _unsized, layers
from lazycell.layers import (
    LazyBatchNorm1d,
    LazyBatchNorm2d,
    LazyBatchNorm3d,
    LazyConv1d,
    LazyConv1dTranspose,
    LazyConv2d,
    LazyConv2dTranspose,
    LazyConv3d,
    LazyConv3dTranspose,
    LazyDense,
    LazyLayerNorm,
    LazyShapeMixin,
)

pytestmark = pytest.mark.filterwarnings("ignore::lazycell.UnusedLayerWarning")

MODES = {"PyNative": ms.PYNATIVE_MODE, "Graph": ms.GRAPH_MODE}
both_modes = pytest.mark.parametrize("mode", MODES)
both_bases = pytest.mark.parametrize("base", [nn.Cell, lazycell.LazyCell])

# Each layer, its eager twin, and the shape of an input.
KINDS: dict[str, tuple[Callable[[], nn.Cell], Callable[[], nn.Cell], tuple[int, ...]]] = {
    "Dense": (lambda: LazyDense(3), lambda: nn.Dense(5, 3), (2, 5)),
    "Dense, 3 dimensions": (
        lambda: LazyDense(3, activation="relu"), lambda: nn.Dense(5, 3, activation="relu"), (2, 4, 5)
    ),
    "Dense, initializers": (
        lambda: LazyDense(3, Normal(0.5), bias_init="ones"),
        lambda: nn.Dense(5, 3, Normal(0.5), bias_init="ones"), (2, 5)
    ),
    "Conv1d": (lambda: LazyConv1d(3, 2, has_bias=True), lambda: nn.Conv1d(4, 3, 2, has_bias=True), (2, 4, 6)),
    "Conv2d": (lambda: LazyConv2d(4, 3), lambda: nn.Conv2d(3, 4, 3), (2, 3, 6, 6)),
    "Conv2d, groups": (
        lambda: LazyConv2d(6, 3, group=3, has_bias=True),
        lambda: nn.Conv2d(6, 6, 3, group=3, has_bias=True), (2, 6, 5, 5)
    ),
    "Conv3d": (lambda: LazyConv3d(2, 2, has_bias=True), lambda: nn.Conv3d(3, 2, 2, has_bias=True), (1, 3, 4, 4, 4)),
    "Conv1dTranspose": (
        lambda: LazyConv1dTranspose(3, 2, has_bias=True), lambda: nn.Conv1dTranspose(4, 3, 2, has_bias=True), (2, 4, 6)
    ),
    "Conv2dTranspose": (
        lambda: LazyConv2dTranspose(4, 3, has_bias=True),
        lambda: nn.Conv2dTranspose(3, 4, 3, has_bias=True), (2, 3, 6, 6)
    ),
    "Conv3dTranspose": (lambda: LazyConv3dTranspose(2, 2), lambda: nn.Conv3dTranspose(3, 2, 2), (1, 3, 4, 4, 4)),
    "BatchNorm1d": (lambda: LazyBatchNorm1d(), lambda: nn.BatchNorm1d(5), (2, 5)),
    "BatchNorm2d": (lambda: LazyBatchNorm2d(momentum=0.7), lambda: nn.BatchNorm2d(5, momentum=0.7), (2, 5, 3, 3)),
    "BatchNorm2d, 4 channels": (lambda: LazyBatchNorm2d(), lambda: nn.BatchNorm2d(4), (2, 4, 3, 3)),
    "BatchNorm3d": (
        lambda: LazyBatchNorm3d(gamma_init="uniform"),
        lambda: nn.BatchNorm3d(5, gamma_init="uniform"), (2, 5, 3, 3, 3)
    ),
    "LayerNorm": (lambda: LazyLayerNorm(), lambda: nn.LayerNorm((5,)), (2, 4, 5)),
    "LayerNorm, 3 features": (lambda: LazyLayerNorm(), lambda: nn.LayerNorm((3,)), (2, 3)),
    "LayerNorm, 2 dimensions": (
        lambda: LazyLayerNorm(begin_norm_axis=1, begin_params_axis=1),
        lambda: nn.LayerNorm((4, 5), begin_norm_axis=1, begin_params_axis=1), (2, 4, 5)
    ),
}  # fmt: skip
kinds = pytest.mark.parametrize("kind", KINDS)


def random_input(shape: tuple[int, ...]) -> Tensor:
    """An input that doesn't depend on where the random streams stand, nor moves them."""
    size = math.prod(shape)
    return Tensor(np.sin(np.arange(size)).astype(np.float32).reshape(shape))


def net_of(base: type[nn.Cell], *create: Callable[[], nn.Cell]) -> nn.Cell:
    """A net that calls some layers one after the other, with an eager one at its end."""

    class Net(base):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.CellList([make() for make in create])
            self.last = Parameter(initializer(Normal(), (2,)), name="last")

        def construct(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return x * self.last[0]

    return Net()


def twins(base: type[nn.Cell], *names_of_kinds: str) -> tuple[nn.Cell, nn.Cell]:
    """An eager net, and one that infers its sizes, built from one seed; the streams must agree after it."""
    seed()
    eager = net_of(nn.Cell, *(KINDS[name][1] for name in names_of_kinds))
    after = stream()
    seed()
    lazy = net_of(base, *(KINDS[name][0] for name in names_of_kinds))
    assert after == stream()
    return eager, lazy


def assert_waits(layer: nn.Cell) -> None:
    """Nothing of a layer is known but names, and asking for more says what to do."""
    assert isinstance(layer, LazyShapeMixin) and "=?" in repr(layer)
    for parameter in layer.get_parameters():
        assert "shape=?" in str(parameter)
        for ask in (
            lambda p: p.shape, lambda p: p.size, lambda p: p.ndim, lambda p: p.asnumpy(), lambda p: p * 2,
            lambda p: p.init_data(), lambda p: p.value(), len, Tensor, lambda p: p.copy(),
        ):  # fmt: skip
            with pytest.raises(lazycell.UntouchedError, match=r"infers .* lazycell\.dry_run\(net, inputs\)"):
                ask(parameter)


def look(thing: object) -> str:
    """How something prints, wherever in memory it is."""
    return re.sub("0x[0-9a-f]+", "", str(thing))


def plain_attributes(cell: nn.Cell) -> dict[str, object]:
    """What a cell's class has set that can be compared: numbers, words, and what its operators were built with."""
    found: dict[str, object] = {}
    for path, inner in cell.cells_and_names():
        for name in vars(inner).keys() - internals.attributes_of_all():
            value = vars(inner)[name]
            if isinstance(value, (int, float, str, tuple, type(None))):
                found[f"{path}.{name}"] = look(value)
            if isinstance(value, ops.Primitive):
                found[f"{path}.{name}"] = str(value), str(value.attrs), str(value.init_attrs)
    return {name: value for name, value in found.items() if "_lazycell" not in name}


class TestBecomingEager:
    """The first input gives the size; afterwards the layer is the eager one."""

    @kinds
    @both_bases
    @both_modes
    def test_a_layer_becomes_its_eager_twin(self, kind: str, base: type[nn.Cell], mode: str) -> None:
        """Class, repr, attributes, operators, names, objects, values, outputs and random streams."""
        eager, lazy = twins(base, kind)
        before = list(lazy.get_parameters())
        assert_waits(lazy.blocks[0])
        assert names(eager.get_parameters()) == names(before)
        assert list(eager.parameters_dict()) == list(lazy.parameters_dict())
        ms.set_context(mode=MODES[mode])
        x, where = random_input(KINDS[kind][2]), stream()
        assert bits(eager(x)) == bits(lazy(x))
        assert where == stream()
        assert type(lazy.blocks[0]) is type(eager.blocks[0])
        assert look(lazy.blocks[0]) == look(eager.blocks[0])
        assert plain_attributes(lazy.blocks[0]) == plain_attributes(eager.blocks[0])
        assert [id(p) for p in before] == [id(p) for p in lazy.get_parameters()]
        assert_same_values(eager, lazy)

    @kinds
    def test_another_size_is_mindspores_own_error(self, kind: str) -> None:
        """A second input of another size is refused as the eager layer refuses it; nothing is inferred anew."""
        eager, lazy = twins(nn.Cell, kind)
        x = random_input(KINDS[kind][2])
        lazy(x)
        eager(x)
        shape = [size + 6 if axis else size for axis, size in enumerate(KINDS[kind][2])]
        errors = []
        for net in (eager, lazy):
            try:
                net(random_input(tuple(shape))).asnumpy()
            except Exception as error:
                errors.append((type(error), str(error).partition("\n")[0]))
        assert len(errors) == 2 and errors[0] == errors[1]
        assert_same_values(eager, lazy)

    def test_a_settled_layer_runs_nothing_of_lazycell(self) -> None:
        """Its speed is the eager layer's."""
        layer = LazyDense(3)
        x = ones(2, 5)
        layer(x)
        assert lazycell_calls(lambda: layer(x), with_guard=False) == 0

    def test_the_hook_into_compilations_is_gone_when_nothing_waits(self) -> None:
        """MindSpore's executors are as they were found."""
        gc.collect()
        for waiting in list(_sizing.WaitingLayer.all):  # of other tests
            _sizing.WaitingLayer.all.discard(waiting)
        _settle_hook()
        before = _compilers()
        layer = LazyDense(3)
        assert _compilers() != before
        layer(ones(2, 5))
        _settle_hook()
        assert _compilers() == before

    @given(order=st.permutations(range(4)), dry=st.booleans())
    def test_values_do_not_depend_on_the_order_of_first_calls(self, order: list[int], dry: bool) -> None:
        """Nor on whether a layer is called or dry-run."""
        chosen = ("Dense", "Conv2d", "BatchNorm3d", "Dense, initializers")
        eager, lazy = twins(lazycell.LazyCell, *chosen)
        for index in order:
            x = random_input(KINDS[chosen[index]][2])
            if dry:
                lazycell.dry_run(lazy.blocks[index], lazycell.spec(*x.shape))
            else:
                lazy.blocks[index](x)
        assert_same_values(eager, lazy)

    def test_forward_hooks_come_first(self) -> None:
        """What a hook makes of the input is what gives the size."""
        layer = LazyDense(3)
        layer.register_forward_pre_hook(lambda cell, inputs: (inputs[0][:, :4],))
        layer(ones(2, 5))
        assert layer.in_channels == 4 and layer(ones(2, 5)).shape == (2, 3)

    def test_what_was_set_meanwhile_stays(self) -> None:
        """Attributes, flags, and what requires a gradient."""
        layer = LazyDense(3)
        layer.has_bias = False
        layer.mine = "kept"
        layer.set_train()
        layer.weight.requires_grad = False
        layer.bias.set_dtype(ms.float16)
        layer(ones(2, 5))
        assert (layer.has_bias, layer.mine, layer.training) == (False, "kept", True)
        assert names(layer.trainable_params()) == ["bias"]
        assert layer.bias.dtype == ms.float16 and layer.bias.asnumpy().dtype == np.float16

    def test_an_input_by_name(self) -> None:
        """By the name that the eager layer has for it; others are refused as by that."""
        layer = LazyLayerNorm()
        with pytest.raises(TypeError, match="input_x"):
            layer(inputs=ones(2, 5))
        assert layer(input_x=ones(2, 5)).shape == (2, 5)

    @pytest.mark.parametrize(
        "create, shape, given_input",
        [
            (lambda weight: LazyConv2d(4, 3, group=2, weight_init=weight), (4, 3, 3, 3), (1, 6, 5, 5)),
            (lambda weight: LazyConv2dTranspose(4, 3, weight_init=weight), (6, 4, 3, 3), (1, 6, 5, 5)),
            (lambda weight: LazyConv1d(4, 3, weight_init=weight), (4, 6, 3), (1, 6, 5)),
            (lambda gamma: LazyBatchNorm1d(gamma_init=gamma), (6,), (2, 6)),
            (lambda gamma: LazyLayerNorm(gamma_init=gamma), (6,), (2, 6)),
        ],
    )
    def test_tensors_for_other_layers(
        self, create: Callable[[Tensor], nn.Cell], shape: tuple[int, ...], given_input: tuple[int, ...]
    ) -> None:
        """They are the first parameter's values."""
        value = random_input(shape)
        layer = create(value)
        layer(random_input(given_input))
        assert any(p.asnumpy().tobytes() == value.asnumpy().tobytes() for p in layer.get_parameters())

    def test_a_tensor_for_the_weight(self) -> None:
        """It asks for its own size, and any other is MindSpore's error."""
        weight = Tensor(np.arange(15, dtype=np.float32).reshape(3, 5))
        layer = LazyDense(3, weight_init=weight)
        with pytest.raises(lazycell.LazyCellError, match="weight init shape error"):
            layer(ones(2, 6))
        assert_waits(layer)
        layer(ones(2, 5))
        assert bits(layer.weight) == bits(weight)

    def test_a_cell_for_the_activation(self) -> None:
        """It stays the same object, and its parameters keep their names."""
        activation = nn.PReLU()
        eager = net_of(nn.Cell, lambda: nn.Dense(5, 3, activation=nn.PReLU()))
        lazy = net_of(nn.Cell, lambda: LazyDense(3, activation=activation))
        lazy(ones(2, 5))
        assert lazy.blocks[0].activation is activation
        assert names(lazy.get_parameters()) == names(eager.get_parameters())

    def test_an_initializer_of_the_users_own(self) -> None:
        """It draws where it would have drawn."""

        class Own(Initializer):
            def _initialize(self, array: np.ndarray) -> None:
                array[...] = np.random.normal(size=array.shape)

        seed()
        eager = nn.Dense(5, 3, weight_init=Own())
        seed()
        layer = LazyDense(3, weight_init=Own())
        np.random.rand(10)
        layer(ones(2, 5))
        assert bits(layer.weight) == bits(eager.weight)


def _compilers() -> list[object]:
    api = internals._graphs.api
    return [vars(type(api._cell_graph_executor)).get("compile"), vars(api._JitExecutor).get("compile")]


def _settle_hook() -> None:
    """Compile something, which looks whether anything waits."""

    @ms.jit
    def double(x: Tensor) -> Tensor:
        return x * 2

    double(ones(2))


class TestWaiting:
    """Before the first input."""

    @kinds
    def test_a_wrong_first_input_leaves_the_layer_as_it_was(self, kind: str) -> None:
        """Too few dimensions are refused, with what is wanted; the next input gives the size."""
        eager, lazy = twins(lazycell.LazyCell, kind)
        wrong = Tensor(1.0) if "Dense" in kind or kind.startswith("LayerNorm") else ones(3)
        for given_input in (wrong, "text", random_input(KINDS[kind][2]).asnumpy()):
            with pytest.raises(lazycell.LazyCellError, match="from its first input, a tensor with"):
                lazy.blocks[0](given_input)
        assert_waits(lazy.blocks[0])
        x = random_input(KINDS[kind][2])
        assert bits(eager(x)) == bits(lazy(x))
        assert_same_values(eager, lazy)

    def test_a_size_that_the_layer_refuses(self) -> None:
        """Channels that don't go into the groups: MindSpore's reason, and the layer still waits."""
        layer = LazyConv2d(4, 3, group=2)
        with pytest.raises(lazycell.LazyCellError, match="in_channels=3.*divisible"):
            layer(ones(1, 3, 5, 5))
        assert_waits(layer)
        assert layer(ones(1, 6, 5, 5)).shape == (1, 4, 5, 5)

    def test_arguments_are_the_eager_ones(self) -> None:
        """Without the size; a missing, unknown or wrong one is refused at once."""
        with pytest.raises(TypeError, match="out_channels"):
            LazyDense()
        with pytest.raises(TypeError, match="in_channels"):
            LazyDense(3, in_channels=5)
        with pytest.raises(ValueError, match="out_channels"):
            LazyDense(-3)
        assert repr(LazyDense(3, has_bias=False)) == "LazyDense(in_channels=?, out_channels=3, has_bias=False)"

    def test_classes(self) -> None:
        """It is an instance of both, and equals the eager class where MindSpore looks for that."""
        layer = LazyBatchNorm2d()
        assert isinstance(layer, LazyBatchNorm2d) and isinstance(layer, nn.BatchNorm2d)
        assert type(layer) == nn.BatchNorm2d  # noqa: E721
        assert type(layer) in (nn.BatchNorm1d, nn.BatchNorm2d)
        assert type(layer).__name__ == "LazyBatchNorm2d"

    def test_operators_refuse(self) -> None:
        """Nothing computes with a nominal shape. MindSpore 2.9 prints the reason, and raises an error of its own."""
        parameter = LazyDense(3).weight
        asked = internals.OPERATORS_ASK and not ms.__version__.startswith("2.9")
        error = lazycell.UntouchedError if asked else RuntimeError
        for operate in (ops.relu, ops.ones_like, ops.abs, lambda p: ops.concat([p, p]), lambda p: ones(1, 3) + p):
            with pytest.raises(error):
                operate(parameter).asnumpy()

    def test_sizes_are_not_the_nominal_ones(self) -> None:
        """Nobody gets a wrong number."""
        with pytest.raises(lazycell.UntouchedError, match="in_channels"):
            LazyDense(3).in_channels  # noqa: B018
        assert not hasattr(LazyBatchNorm3d().bn2d, "num_features")

    @pytest.mark.parametrize("dry", [False, True])
    def test_a_weight_that_is_read_before_its_layer_is_called(self, dry: bool) -> None:
        """It is refused, and doesn't count as touched."""

        class Reads(lazycell.LazyCell):
            def __init__(self) -> None:
                super().__init__()
                self.fc = LazyDense(3)

            def construct(self, x: Tensor) -> Tensor:
                return ops.matmul(x, self.fc.weight)

        net = Reads()
        with pytest.raises(lazycell.UntouchedError, match="fc.weight has neither"):
            lazycell.dry_run(net, lazycell.spec(2, 3)) if dry else net(ones(2, 3))
        assert touched(net) == set()
        assert_waits(net.fc)

    def test_an_optimizer_refuses_it(self) -> None:
        """As in PyTorch, it comes after the first pass; a LazyOptimizer waits."""
        net = nn.SequentialCell(LazyDense(3))
        with pytest.raises(lazycell.UntouchedError):
            nn.Momentum(net.trainable_params(), 0.1, 0.9)
        net(ones(2, 5))
        assert len(nn.Momentum(net.trainable_params(), 0.1, 0.9).parameters) == 2

    def test_predicates_of_an_optimizer_wait_for_shapes(self) -> None:
        """Groups are chosen by what the predicate says of a parameter that has its shape, as for the eager net."""
        steps = []
        for net in twins(lazycell.LazyCell, "Dense", "LayerNorm, 3 features"):
            groups = [{"params": lambda p: p.ndim < 2, "weight_decay": 0.0}, {"params": net, "weight_decay": 0.5}]
            optimizer = lazycell.LazyOptimizer(nn.AdamWeightDecay, groups, learning_rate=0.1)
            grad = lazycell.grad(lambda x, net=net: net(x).sum(), None, optimizer.parameters)
            for _ in range(2):
                optimizer(grad(random_input((2, 5))))
            steps.append((names(optimizer.parameters), [bits(p) for p in net.get_parameters()]))
        assert steps[0] == steps[1]

    @pytest.mark.parametrize("how", ["call", "dry run", "value"])
    def test_zeros_where_gradients_do_not_arrive(self, how: str) -> None:
        """MindSpore's zeros have the shape that the layer got, so that a plain optimizer can take them."""
        net = nn.CellList([LazyDense(4), nn.Dense(3, 2)])
        if how == "call":
            net[0](ones(2, 5))
        elif how == "dry run":
            lazycell.dry_run(net[0], lazycell.spec(2, 5))
        else:
            net[0].weight.set_data(ones(4, 5))
        parameters = net.trainable_params()
        grads = ms.grad(lambda x: net[1](x).sum(), None, parameters)(ones(2, 3))
        assert [g.shape for g in grads] == [p.shape for p in parameters]
        nn.Momentum(parameters, 0.1, 0.9)(grads)

    def test_hooks_of_a_parameter_go_over(self) -> None:
        """What was registered while it waited, and not removed, runs; and can be removed afterwards."""
        layer = LazyDense(3, has_bias=False)
        removed = layer.weight.register_hook(lambda grad: grad * 5)
        kept = layer.weight.register_hook(lambda grad: grad * 2)
        removed.remove()
        grad = ms.grad(lambda x: layer(x).sum(), None, layer.trainable_params())
        assert grad(ones(1, 2))[0].asnumpy().tolist() == [[2.0, 2.0]] * 3
        kept.remove()
        assert grad(ones(1, 2))[0].asnumpy().tolist() == [[1.0, 1.0]] * 3

    def test_registry_report_and_warning(self, recwarn: pytest.WarningsRecorder) -> None:
        """Sizes that nobody knows are question marks, and count 0."""

        class Net(lazycell.LazyCell):
            def __init__(self) -> None:
                super().__init__()
                self.used = nn.Dense(4, 3)
                self.dead = nn.SequentialCell(LazyDense(3), nn.Dense(3, 2))

            def construct(self, x: Tensor) -> Tensor:
                return self.used(x)

        net = Net()
        known = lazycell.registry(net)
        records = {record.name: record for record in known.layers}
        assert not records["dead.0"].sized and records["dead.1"].sized
        assert (records["dead.0"].num_parameters, known.num_parameters, known.nbytes) == (0, 23, 92)
        assert "LazyDense       deferred           ?      ?" in str(known)
        assert "(0): LazyDense" in lazycell.report(net) and "8 + ?" in lazycell.report(net)
        assert '"sized": false' in lazycell.report(net, "json")
        assert "sizes not known yet" in lazycell.report(net, "html")
        net(ones(2, 4))
        (warning,) = [w for w in recwarn if w.category is lazycell.UnusedLayerWarning]
        assert "dead (SequentialCell): 8 + ? parameters, 32 B + ?" in str(warning.message)

    def test_the_warning_names_a_layer_that_waits(self, recwarn: pytest.WarningsRecorder) -> None:
        """Also if that is all there is."""
        net = lazycell.track(nn.SequentialCell(nn.Dense(4, 3), nn.Dense(3, 2)))
        net.other = LazyDense(3)
        net(ones(2, 4))
        (warning,) = [w for w in recwarn if w.category is lazycell.UnusedLayerWarning]
        assert "other (LazyDense): parameters whose shape isn't known yet" in str(warning.message)

    def test_verbs(self) -> None:
        """Freezing, releasing and resetting don't need sizes; allocating names what waits, and allocates nothing."""
        net = lazycell.track(net_of(lazycell.LazyCell, *(KINDS[kind][0] for kind in ("Dense", "BatchNorm1d"))))
        assert lazycell.release(net) == 0
        lazycell.freeze(net.blocks[0])
        lazycell.registry(net).reset()
        with pytest.raises(lazycell.UntouchedError, match="sizes of blocks.0, blocks.1"):
            lazycell.materialize(net)
        assert "last" in deferred(net)
        net(ones(2, 5))
        assert names(net.trainable_params()) == ["last", "blocks.1.gamma", "blocks.1.beta"]
        lazycell.materialize(net)

    def test_optional_and_callbacks(self) -> None:
        """A callback gets the layer with its size."""
        net = net_of(lazycell.LazyCell, KINDS["Dense"][0])
        seen = []
        lazycell.registry(net).on_touch(seen.append)
        net(ones(2, 5))
        assert [(r.name, r.num_parameters, r.sized) for r in seen if r.name == "blocks.0"] == [("blocks.0", 18, True)]


class TestCopiesAndTies:
    """More than one name for a layer or a parameter."""

    @kinds
    def test_copies_before(self, kind: str) -> None:
        """A copy waits by itself, and comes to the same values."""
        eager, lazy = twins(lazycell.LazyCell, kind)
        copied = copy.deepcopy(lazy)
        x = random_input(KINDS[kind][2])
        out = bits(lazy(x))
        assert_waits(copied.blocks[0])
        assert not {id(p) for p in lazy.get_parameters()} & {id(p) for p in copied.get_parameters()}
        assert bits(copied(x)) == out
        assert type(copied.blocks[0]) is type(eager.blocks[0])
        assert_same_values(eager, copied)

    def test_copies_of_different_sizes(self) -> None:
        """Each copy has its own."""
        layer = LazyDense(3)
        others = [copy.deepcopy(layer) for _ in range(2)]
        assert [other(ones(2, size)).shape for other, size in zip(others, (4, 6))] == [(2, 3), (2, 3)]
        assert [other.weight.shape for other in others] == [(3, 4), (3, 6)]
        assert_waits(layer)

    def test_copies_after(self) -> None:
        """A copy of a layer that has its size has it, too."""
        layer = LazyDense(3)
        layer(ones(2, 5))
        assert_same_values(layer, copy.deepcopy(layer))

    def test_a_parameter_is_copied_alone(self) -> None:
        """The copy has the name, and takes a value."""
        parameter = copy.deepcopy(LazyDense(3).weight)
        with pytest.raises(lazycell.UntouchedError):
            parameter.shape  # noqa: B018

    def test_the_same_layer_twice(self) -> None:
        """It gets its size once."""
        layer = LazyDense(5)
        net = nn.SequentialCell(layer, nn.ReLU(), layer)
        assert net(ones(2, 5)).shape == (2, 5)
        assert type(net[2]) is nn.Dense and net[2] is net[0]

    @pytest.mark.parametrize("first", [0, 1])
    def test_a_parameter_of_two_waiting_layers(self, first: int) -> None:
        """Whichever comes first gives it its shape."""

        def make(create: Callable[[], nn.Cell]) -> nn.Cell:
            seed()
            net = nn.CellList([create(), create()])
            net[1].weight = net[0].weight
            return net

        eager, lazy = make(lambda: nn.Dense(5, 3)), make(lambda: LazyDense(3))
        shared = lazy[0].weight
        lazy[first](ones(2, 5))
        lazy[1 - first](ones(2, 5))
        assert lazy[0].weight is lazy[1].weight is shared
        assert_same_values(eager, lazy)

    def test_tied_to_an_eager_layer(self) -> None:
        """A waiting layer whose weight is somebody else's takes its own size from its input, and leaves that weight."""
        eager, layer = nn.Dense(5, 3), LazyDense(3)
        value = bits(eager.weight)
        layer.weight = eager.weight
        assert bits(layer(ones(2, 5))) is not None
        assert layer.weight is eager.weight and bits(eager.weight) == value and layer.in_channels == 5

    def test_a_plain_cell_keeps_the_weight_of_a_layer_in_it(self) -> None:
        """MindSpore fills a called cell's own parameters; one that waits isn't needed yet."""

        class Tied(nn.Cell):
            def __init__(self) -> None:
                super().__init__()
                self.encode = LazyDense(3)
                self.tied = self.encode.weight

            def construct(self, x: Tensor) -> Tensor:
                return ops.matmul(self.encode(x), self.tied)

        net = Tied()
        assert net(ones(2, 5)).shape == (2, 5)
        assert net.tied is net.encode.weight


class TestValues:
    """Values that are loaded give the size as well."""

    @kinds
    @pytest.mark.parametrize("how", ["load_param_into_net", "load_state_dict", "set_data"])
    def test_an_eager_checkpoint_gives_the_sizes(self, kind: str, how: str, tmp_path: Path) -> None:
        """The layer is the eager one then, and the first call leaves the values alone."""
        eager, lazy = twins(lazycell.LazyCell, kind)
        seed(7)
        trained, _ = twins(nn.Cell, kind)
        for number, parameter in enumerate(trained.get_parameters()):
            parameter.set_data(parameter * 0 + 0.25 + number)
        before = list(lazy.get_parameters())
        if how == "load_param_into_net":
            ms.save_checkpoint(trained, str(tmp_path / "net.ckpt"))
            assert ms.load_param_into_net(lazy, ms.load_checkpoint(str(tmp_path / "net.ckpt")))[0] == []
        elif how == "load_state_dict":
            lazy.load_state_dict(trained.state_dict())
        else:
            for parameter, value in zip(lazy.get_parameters(), trained.get_parameters()):
                parameter.set_data(Tensor(value.asnumpy()))
        assert type(lazy.blocks[0]) == type(eager.blocks[0])  # noqa: E721
        assert not isinstance(lazy.blocks[0], LazyShapeMixin)
        assert look(lazy.blocks[0]) == look(eager.blocks[0])
        assert [id(p) for p in before] == [id(p) for p in lazy.get_parameters()]
        x = random_input(KINDS[kind][2])
        assert bits(trained(x)) == bits(lazy(x))
        assert type(lazy.blocks[0]) is type(eager.blocks[0])
        assert_same_values(trained, lazy)

    def test_a_checkpoint_for_an_eager_net(self, tmp_path: Path) -> None:
        """The other way round."""
        eager, lazy = twins(lazycell.LazyCell, "Dense", "LayerNorm, 3 features")
        x = random_input((2, 5))
        expected = bits(lazy(x))
        ms.save_checkpoint(lazy, str(tmp_path / "net.ckpt"))
        seed(3)
        eager.blocks[0].weight.set_data(eager.blocks[0].weight * 0)
        assert ms.load_param_into_net(eager, ms.load_checkpoint(str(tmp_path / "net.ckpt"))) == ([], [])
        assert bits(eager(x)) == expected

    def test_saving_before_is_an_error(self, tmp_path: Path) -> None:
        """A checkpoint holds values; what has none can be left out."""
        net = net_of(nn.Cell, KINDS["Dense"][0])
        with pytest.raises(lazycell.UntouchedError, match="blocks.0.weight has neither shape nor values"):
            ms.save_checkpoint(net, str(tmp_path / "net.ckpt"))
        ms.save_checkpoint(net, str(tmp_path / "part.ckpt"), choice_func=lambda name: name == "last")
        assert list(ms.load_checkpoint(str(tmp_path / "part.ckpt"))) == ["last"]
        assert list(net.state_dict()) == names(net.get_parameters())
        with pytest.raises(lazycell.UntouchedError):
            net_of(nn.Cell, KINDS["Dense"][0]).load_state_dict(net.state_dict())

    def test_a_value_that_fits_no_size(self) -> None:
        """It is refused, and the layer still waits."""
        layer = LazyDense(3)
        for shape in ((4, 5), (3,), (3, 5, 1)):
            with pytest.raises(lazycell.LazyCellError, match=r"can't have the shape"):
                layer.weight.set_data(ones(*shape))
            assert_waits(layer)
        with pytest.raises(lazycell.LazyCellError, match=r"can't have the shape"):
            LazyConv2d(4, 3, group=2).weight.set_data(ones(4, 2, 5, 5))

    def test_numbers_fit_no_size(self) -> None:
        """A number has no shape."""
        with pytest.raises(lazycell.UntouchedError):
            LazyDense(3).weight.set_data(1.0)

    def test_a_bias_first(self) -> None:
        """It tells no size, and keeps its value."""
        layer = LazyDense(3)
        layer.bias.set_data(ones(3))
        assert isinstance(layer, LazyDense) and layer.bias.shape == (3,)
        with pytest.raises(lazycell.UntouchedError):
            layer.weight.shape  # noqa: B018
        layer(ones(2, 5))
        assert bits(layer.bias) == bits(ones(3)) and layer.weight.shape == (3, 5)

    def test_an_initializer_gives_the_size(self) -> None:
        """It is drawn at this point of the random stream, as of an eager layer."""
        seed()
        eager = nn.Dense(5, 3)
        eager.weight.set_data(initializer(Normal(0.3), (3, 5)))
        seed()
        layer = LazyDense(3)
        layer.weight.set_data(initializer(Normal(0.3), (3, 5)))
        assert not isinstance(layer, LazyDense)
        layer(ones(2, 5))
        assert_same_values(eager, layer)

    def test_assigning_a_tensor_to_the_attribute(self) -> None:
        """MindSpore sets the parameter's data."""
        layer = LazyDense(3)
        layer.weight = ones(3, 5)
        assert layer.in_channels == 5 and bits(layer.weight) == bits(ones(3, 5))

    def test_then_the_input_must_fit(self) -> None:
        """PyTorch: loaded parameters are not replaced by a dry run."""
        layer = LazyDense(3)
        layer.weight.set_data(ones(3, 5))
        with pytest.raises(ValueError):
            layer(ones(2, 6)).asnumpy()
        assert layer(ones(2, 5)).shape == (2, 3)


class TestGraphs:
    """Compiled: as cells, in functions, around and inside MindSpore's own."""

    def test_a_jitted_function(self) -> None:
        """Sizes are known before it is compiled."""
        eager, lazy = twins(nn.Cell, "Dense", "LayerNorm, 3 features")

        @ms.jit
        def run(x: Tensor) -> Tensor:
            return lazy(x) * 1

        x = random_input((2, 5))
        assert bits(run(x)) == bits(eager(x))
        assert_same_values(eager, lazy)

    def test_gradients_in_a_jitted_function(self) -> None:
        """Gradients of the inputs, of a net whose sizes aren't known."""
        eager, lazy = twins(lazycell.LazyCell, "Dense")

        def loss(x: Tensor) -> Tensor:
            return lazy(x).sum()

        @ms.jit
        def step(x: Tensor) -> Tensor:
            return ms.grad(loss)(x)

        x = random_input((2, 5))
        assert bits(step(x)) == bits(ms.grad(lambda value: eager(value).sum())(x))

    @pytest.mark.parametrize("library", [ms, lazycell], ids=["mindspore", "lazycell"])
    def test_gradient_functions_that_are_compiled(self, library: ModuleType) -> None:
        """They run their function for its sizes, whichever weights they were given."""
        eager, lazy = twins(nn.Cell, "Dense")
        ms.set_context(mode=ms.GRAPH_MODE)
        x = random_input((2, 5))
        found = []
        for net in (eager, lazy):
            run = Through(net)
            found.append([bits(g) for g in library.grad(run.loss, None, net.trainable_params())(x)])
        assert found[0] == found[1]

    @pytest.mark.parametrize("library", [ms, lazycell], ids=["mindspore", "lazycell"])
    def test_compiled_gradients_by_what_is_not_called(self, library: ModuleType) -> None:
        """They are refused, at each call: nobody knows their shape."""
        net = nn.CellList([LazyDense(3), LazyDense(2)])
        ms.set_context(mode=ms.GRAPH_MODE)
        grad = library.grad(Through(net[0]).loss, None, list(net.get_parameters()))
        for _ in range(2):
            with pytest.raises(lazycell.UntouchedError, match="1.weight has neither shape nor values"):
                grad(ones(2, 5))
        assert_waits(net[1])

    def test_mindspores_older_gradient_functions(self) -> None:
        """`GradOperation` of a cell."""
        found = []
        for net in twins(nn.Cell, "Dense"):
            ms.set_context(mode=ms.GRAPH_MODE)
            weights = ParameterTuple(net.trainable_params())
            found.append([bits(g) for g in ops.GradOperation(get_by_list=True)(net, weights)(random_input((2, 5)))])
        assert found[0] == found[1]

    def test_a_jitted_function_that_is_differentiated(self) -> None:
        """The dry run before its compilation leaves the recording alone, also if shapes alone don't go through."""
        found = []
        for net in twins(nn.Cell, "Dense"):
            run = Through(net)
            grads = ms.grad(ms.jit(run.cross_entropy), None, net.trainable_params())(random_input((2, 5)))
            found.append([bits(g) for g in grads])
        assert found[0] == found[1]

    def test_mindspores_own_cell_around_it(self) -> None:
        """A loss cell, in Graph mode."""
        eager, lazy = twins(nn.Cell, "Dense")
        ms.set_context(mode=ms.GRAPH_MODE)
        x, y = random_input((2, 5)), ones(2, 3)
        assert bits(nn.WithLossCell(eager, nn.MSELoss())(x, y)) == bits(nn.WithLossCell(lazy, nn.MSELoss())(x, y))

    def test_a_layer_by_itself(self) -> None:
        """As the outermost cell."""
        ms.set_context(mode=ms.GRAPH_MODE)
        layer = LazyDense(3)
        assert layer(ones(2, 5)).shape == (2, 3)
        assert type(layer) is nn.Dense

    def test_a_training_cell(self) -> None:
        """Its net gets its sizes, and no step is made in advance."""
        eager, lazy = twins(lazycell.LazyCell, "Dense")
        x, y = random_input((2, 5)), ones(2, 3)
        lazycell.dry_run(lazy, lazycell.spec(2, 5))
        ms.set_context(mode=ms.GRAPH_MODE)
        for net in (eager, lazy):
            optimizer = nn.Momentum(net.trainable_params(), 0.1, 0.9)
            nn.TrainOneStepCell(nn.WithLossCell(net, nn.MSELoss()), optimizer)(x, y)
        assert_same_values(eager, lazy)

    def test_inputs_of_any_size(self) -> None:
        """What `set_inputs` leaves open, a call tells; a compilation without one can't know."""
        ms.set_context(mode=ms.GRAPH_MODE)
        for shape in ([None, 5], [None, None]):
            net = net_of(nn.Cell, KINDS["Dense"][0])
            net.set_inputs(Tensor(shape=shape, dtype=ms.float32))
            assert net(ones(2, 5)).shape == (2, 3) and net.blocks[0].in_channels == 5
        net = net_of(nn.Cell, KINDS["Dense"][0])
        with pytest.raises(lazycell.UntouchedError, match="what is being compiled holds layers"):
            net.compile(Tensor(shape=[None, None], dtype=ms.float32))
        net.compile(ones(2, 5))
        assert net.blocks[0].in_channels == 5

    def test_a_step_with_a_lazy_optimizer(self) -> None:
        """A training cell's net is run for its sizes, and nothing else of it: one step is one step."""
        eager, lazy = twins(lazycell.LazyCell, "Dense")
        x, y = random_input((2, 5)), ones(2, 3)
        ms.set_context(mode=ms.GRAPH_MODE)
        for net, factory in ((eager, nn.Momentum), (lazy, None)):
            parameters = net.trainable_params() if factory else None
            optimizer = factory(parameters, 0.1, 0.9) if factory else lazycell.LazyOptimizer(nn.Momentum, net, 0.1, 0.9)
            nn.TrainOneStepCell(nn.WithLossCell(net, nn.MSELoss()), optimizer)(x, y)
        assert_same_values(eager, lazy)

    def test_a_jitted_step_with_an_optimizer(self) -> None:
        """It isn't run for the sizes: it says what to do, and makes no step."""
        net = net_of(lazycell.LazyCell, KINDS["Dense"][0])
        optimizer = lazycell.LazyOptimizer(nn.Momentum, net, 0.1, 0.9)

        @ms.jit
        def step(x: Tensor) -> Tensor:
            optimizer((x,))
            return net(x)

        with pytest.raises(lazycell.UntouchedError, match="what is being compiled holds layers"):
            step(ones(2, 5))
        assert_waits(net.blocks[0])

    def test_a_branch_that_the_dry_run_does_not_take(self) -> None:
        """A branch on a value has both its sides in the graph: that says so, rather than compute with nominal sizes."""
        net = BranchOnValue()
        ms.set_context(mode=ms.GRAPH_MODE)
        with pytest.raises(lazycell.UntouchedError, match=r"\(LazyDense\).*dry_run"):
            net(ones(2, 5), Tensor(1.0))
        ms.set_context(mode=ms.PYNATIVE_MODE)
        net(ones(2, 5), Tensor(1.0))
        net(ones(2, 5), Tensor(-1.0))
        ms.set_context(mode=ms.GRAPH_MODE)
        assert net(ones(2, 5), Tensor(1.0)).shape == (2, 3)

    def test_what_is_not_called_does_not_matter(self) -> None:
        """A layer that waits in a list that the graph holds in part; and each compilation is looked at once."""

        class First(nn.Cell):
            def __init__(self) -> None:
                super().__init__()
                self.blocks = nn.CellList([LazyDense(3), LazyDense(7)])

            def construct(self, x: Tensor) -> Tensor:
                return self.blocks[0](x)

        ms.set_context(mode=ms.GRAPH_MODE)
        first = First()
        x = ones(2, 5)
        assert first(x).shape == (2, 3)
        assert_waits(first.blocks[1])
        assert lazycell_calls(lambda: first(x), with_guard=False) < 40


class Through:
    """Functions of a net that can be compiled."""

    def __init__(self, net: nn.Cell) -> None:
        def loss(x: Tensor) -> Tensor:
            return net(x).sum()

        def cross_entropy(x: Tensor) -> Tensor:
            return criterion(net(x), labels)

        criterion, labels = nn.CrossEntropyLoss(), Tensor([0, 1], ms.int32)
        self.loss, self.cross_entropy = loss, cross_entropy


class BranchOnValue(nn.Cell):
    """Takes one of two layers by the value of a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.one = LazyDense(3)
        self.other = LazyDense(3)

    def construct(self, x: Tensor, choice: Tensor) -> Tensor:
        if choice > 0:
            y = self.one(x)
        else:
            y = self.other(x)
        return y


class TestDryRun:
    """Sizes from shapes alone, and on zeros."""

    @kinds
    @pytest.mark.parametrize("zeros", [False, True])
    def test_a_dry_run_gives_the_sizes(self, kind: str, zeros: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        """Values, statistics and random streams are those of an eager net that hasn't run."""
        if zeros:
            monkeypatch.setattr(internals, "HAS_META", False)
        eager, lazy = twins(nn.Cell, kind)
        lazy.set_train()
        where = stream()
        described = lazycell.dry_run(lazy, lazycell.spec(*KINDS[kind][2]))
        assert where == stream()
        assert described.shape == eager(random_input(KINDS[kind][2])).shape
        lazycell.materialize(lazy)  # nothing waits any more
        assert type(lazy.blocks[0]) is type(eager.blocks[0])
        assert plain_attributes(lazy.blocks[0].set_train(False)) == plain_attributes(eager.blocks[0])
        assert_same_values(eager, lazy)
        assert bits(lazy(random_input(KINDS[kind][2]))) == bits(eager(random_input(KINDS[kind][2])))

    @pytest.mark.skipif(not internals.HAS_META, reason="MindSpore before 2.10 has no meta device that could be used")
    def test_shapes_alone_do(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Parameters that get their shapes on the way are on the meta device from then on, also if indexed."""

        def refuse(*_: object) -> None:
            raise AssertionError("it runs on zeros")

        monkeypatch.setattr(_dry_run, "_run_on_zeros", refuse)
        seed()
        eager = Bilinear(5, 4, 3)
        seed()
        layer = LazyBilinear(3)
        assert lazycell.dry_run(layer, lazycell.spec(2, 5), lazycell.spec(2, 4)).shape == (2, 3)
        assert_same_values(eager, layer)
        for kind in ("Dense", "Conv2d", "BatchNorm2d", "LayerNorm"):
            lazycell.dry_run(twins(nn.Cell, kind)[1], lazycell.spec(*KINDS[kind][2]))

    @pytest.mark.parametrize("dry", [False, True])
    def test_only_the_layers_own_parameters_are_allocated(self, dry: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        """Each once; what the sizes are taken over from has no storage."""
        filled = []
        fill = internals.fill_storage
        monkeypatch.setattr(internals, "fill_storage", lambda kind, p: (filled.append(p.name), fill(kind, p)))
        net = net_of(lazycell.LazyCell, lambda: LazyDense(2))
        if dry:
            lazycell.dry_run(net, lazycell.spec(1, 3))
        else:
            net(ones(1, 3))
        assert sorted(filled) == ["blocks.0.bias", "blocks.0.weight", "last"]
        assert touched(net) == set(filled)


class TestMixedPrecision:
    """PyTorch: first converted to the desired dtype, then run."""

    @pytest.mark.parametrize("level", ["O0", "O2", "O3", "auto"])
    def test_levels(self, level: str) -> None:
        """`auto_mixed_precision` of a net that waits does what it does to the eager one."""
        eager, lazy = twins(nn.Cell, "Conv2d", "BatchNorm2d, 4 channels")
        eager, lazy = (amp.auto_mixed_precision(net, level) for net in (eager, lazy))
        x = random_input((2, 3, 6, 6))
        assert bits(eager(x)) == bits(lazy(x))
        assert [str(p.dtype) for p in eager.get_parameters()] == [str(p.dtype) for p in lazy.get_parameters()]

    @both_modes
    def test_to_float(self, mode: str) -> None:
        """A layer computes in the dtype that was asked for before."""
        ms.set_context(mode=MODES[mode])
        eager, lazy = twins(nn.Cell, "Dense")
        x = random_input((2, 5))
        outputs = [net.to_float(ms.float16)(x) for net in (eager, lazy)]
        assert outputs[0].dtype == outputs[1].dtype and bits(outputs[0]) == bits(outputs[1])

    def test_level_o1_after_the_first_call(self) -> None:
        """`mindspore.rewrite`, which it uses, wants the layers' own classes."""
        eager, lazy = Mlp(False), Mlp(True)
        x = random_input((4, 12))
        lazycell.dry_run(lazy, lazycell.spec(4, 12))
        for one, other in zip(eager.get_parameters(), lazy.get_parameters()):
            other.set_data(Tensor(one.asnumpy()))
        assert bits(amp.auto_mixed_precision(eager, "O1")(x)) == bits(amp.auto_mixed_precision(lazy, "O1")(x))

    def test_a_dtype_of_its_own(self) -> None:
        """As the argument says."""
        layer = LazyDense(3, dtype=ms.float16)
        layer(Tensor(np.ones((2, 5), np.float16)))
        assert layer.weight.dtype == ms.float16


class TestPatch:
    """Under `lazycell.patch()`."""

    @kinds
    def test_every_layer(self, kind: str) -> None:
        """The same classes, values and names."""
        eager, _ = twins(nn.Cell, kind)
        with lazycell.patch():
            seed()
            lazy = net_of(nn.Cell, KINDS[kind][0])
            x = random_input(KINDS[kind][2])
            assert bits(eager(x)) == bits(lazy(x))
            assert type(lazy.blocks[0]) is type(eager.blocks[0])
        assert_same_values(eager, lazy)

    def test_an_optimizer_before_the_first_step(self) -> None:
        """It waits, as for all that is lazy."""
        with lazycell.patch():
            net = nn.SequentialCell(LazyDense(4), nn.ReLU(), LazyDense(1))
            optimizer = nn.Adam(net.trainable_params(), 0.1)
            step = ms.value_and_grad(lambda x: net(x).sum(), None, optimizer.parameters)
            _, gradients = step(ones(2, 5))
            optimizer(gradients)
        assert names(optimizer.parameters) == ["0.weight", "0.bias", "2.weight", "2.bias"]


# ---------------------------------------------------------------------------------------------
# Layers of one's own


class Bilinear(nn.Cell):
    """Two sizes; parameters in a tuple, one whose shape tells nothing, a number, and a child."""

    def __init__(self, left: int, right: int, out: int) -> None:
        super().__init__()
        self.scale = Parameter(initializer("ones", (out,)), name="scale")
        self.pair = ParameterTuple(
            [
                Parameter(initializer(Normal(1.0), (left, out)), name="l"),
                Parameter(initializer(Normal(1.0), (right + 1, out)), name="r"),
            ]
        )
        self.shift = Parameter(Tensor(np.random.rand(left).astype(np.float32)), name="shift")
        self.steps = Parameter(Tensor(left, ms.int32), name="steps", requires_grad=False)
        self.inner = nn.Dense(left, left)
        self.area = left * right

    def construct(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.inner(x) + self.shift
        return (ops.matmul(x, self.pair[0]) + ops.matmul(y, self.pair[1][1:])) * self.scale * self.area


class LazyBilinear(LazyShapeMixin, Bilinear):
    """The same, with what it needs to know."""

    sizes = ("left", "right")

    def infer(self, x: Tensor, y: Tensor) -> dict[str, int]:
        """The last dimensions."""
        return {"left": x.shape[-1], "right": y.shape[-1]}


class TestOwnLayers:
    """`LazyShapeMixin`."""

    def test_a_layer_of_ones_own(self) -> None:
        """With two sizes, a child, a tuple of parameters, values from data, integers."""
        seed()
        eager = Bilinear(5, 4, 3)
        after = stream()
        seed()
        layer = LazyBilinear(3)
        assert repr(layer) == "LazyBilinear(left=?, right=?, out=3)"
        x, y = random_input((2, 5)), random_input((2, 4))
        before = list(layer.get_parameters())
        assert bits(eager(x, y)) == bits(layer(x, y))
        assert type(layer) is Bilinear and layer.area == 20 and layer.pair[0] is before[1]
        assert [id(p) for p in before] == [id(p) for p in layer.get_parameters()]
        assert look(layer) == look(eager)
        assert_same_values(eager, layer)
        assert after is not None  # values from data draw as much as there is data: see the README

    def test_no_value_tells_both_sizes(self) -> None:
        """One parameter may not be enough to know; the input is."""
        layer = LazyBilinear(3)
        with pytest.raises(lazycell.LazyCellError, match="doesn't tell all sizes"):
            layer.pair[0].set_data(ones(5, 3))
        layer.scale.set_data(ones(3) * 2)
        assert layer(ones(2, 5), ones(2, 4)).shape == (2, 3)
        assert bits(layer.scale) == bits(ones(3) * 2)

    def test_on_a_lazy_cell(self) -> None:
        """The eager class may be one, with layers in it that wait by themselves."""

        class Block(lazycell.LazyCell):
            def __init__(self, width: int) -> None:
                super().__init__()
                self.norm = nn.LayerNorm((width,))
                self.dense = LazyDense(width)

            def construct(self, x: Tensor) -> Tensor:
                return x + self.dense(self.norm(x))

        class LazyBlock(LazyShapeMixin, Block):
            sizes = ("width",)

            def infer(self, x: Tensor) -> dict[str, int]:
                return {"width": x.shape[-1]}

        net = nn.SequentialCell(LazyBlock(), LazyBlock())
        copied = copy.deepcopy(net)
        for made in (net, copied):
            assert made(ones(2, 5)).shape == (2, 5)
            assert type(made[0]) is Block and type(made[0].dense) is nn.Dense and made[1].dense.weight.shape == (5, 5)
        assert_same_values(net, copied)

    def test_what_is_missing_is_said(self) -> None:
        """A mixin without an eager class, without sizes, without infer, or with another answer."""

        class Nothing(LazyShapeMixin):
            sizes = ("width",)

        class NoSizes(LazyShapeMixin, nn.Dense):
            pass

        class NoInfer(LazyShapeMixin, nn.Dense):
            sizes = ("in_channels",)

        class Misspelt(LazyShapeMixin, nn.Dense):
            sizes = ("in_features",)

        class WrongInfer(NoInfer):
            def infer(self, x: Tensor) -> dict[str, int]:
                return {"channels": 3}

        for wrong in (Nothing, NoSizes):
            with pytest.raises(TypeError, match="must name an eager layer after LazyShapeMixin, and its sizes"):
                wrong()
        with pytest.raises(TypeError, match="no argument named in_features, of which Misspelt says"):
            Misspelt(3)
        with pytest.raises(NotImplementedError, match="define infer"):
            NoInfer(3)(ones(2, 5))
        with pytest.raises(TypeError, match="must give \\['in_channels'\\] as a dict"):
            WrongInfer(3)(ones(2, 5))

    def test_what_would_be_lost_is_refused(self) -> None:
        """A lazy class can't compute anything else than what it becomes."""
        with pytest.raises(TypeError, match="Doubled defines construct, which is lost once a layer becomes Dense"):

            class Doubled(LazyDense):
                def construct(self, x: Tensor) -> Tensor:
                    return 2 * super().construct(x)

        class Twice:
            def construct(self, x: Tensor) -> Tensor:
                return 2 * super().construct(x)

        with pytest.raises(TypeError, match="construct, which is lost"):

            class FromMixin(Twice, LazyDense):
                pass

        class EagerDoubled(Twice, nn.Dense):
            pass

        class LazyDoubled(LazyShapeMixin, EagerDoubled):
            sizes = ("in_channels",)

            def infer(self, x: Tensor) -> dict[str, int]:
                return {"in_channels": x.shape[-1]}

        layer = LazyDoubled(3, weight_init="ones", has_bias=False)
        assert layer(ones(1, 5)).asnumpy().tolist() == layer(ones(1, 5)).asnumpy().tolist() == [[10.0] * 3]

    def test_public_names(self) -> None:
        """Documented, importable, and under the public name."""
        for name in layers.__all__:
            assert getattr(layers, name).__module__ == "lazycell.layers" and ">>> " in getattr(layers, name).__doc__
        assert lazycell.layers is layers


# ---------------------------------------------------------------------------------------------
# Training


class Mlp(nn.Cell):
    """A multilayer perceptron, without an input size."""

    def __init__(self, lazy: bool) -> None:
        super().__init__()
        self.first = LazyDense(16, activation="relu") if lazy else nn.Dense(12, 16, activation="relu")
        self.norm = LazyLayerNorm() if lazy else nn.LayerNorm((16,))
        self.second = LazyDense(8) if lazy else nn.Dense(16, 8)
        self.last = LazyDense(3) if lazy else nn.Dense(8, 3)

    def construct(self, x: Tensor) -> Tensor:
        return self.last(ops.tanh(self.second(self.norm(self.first(x)))))


class ConvNet(nn.Cell):
    """A small convolutional net, without an input size."""

    def __init__(self, lazy: bool) -> None:
        super().__init__()
        self.conv1 = LazyConv2d(4, 3) if lazy else nn.Conv2d(2, 4, 3)
        self.norm = LazyBatchNorm2d() if lazy else nn.BatchNorm2d(4)
        self.conv2 = LazyConv2d(6, 3, stride=2, has_bias=True) if lazy else nn.Conv2d(4, 6, 3, 2, has_bias=True)
        self.flatten = nn.Flatten()
        self.head = LazyDense(3) if lazy else nn.Dense(6 * 4 * 4, 3)

    def construct(self, x: Tensor) -> Tensor:
        return self.head(self.flatten(ops.relu(self.conv2(ops.relu(self.norm(self.conv1(x)))))))


class LazyMlp(Mlp, lazycell.LazyCell):
    """The same on `LazyCell`."""


@both_modes
@pytest.mark.parametrize("net_class, shape", [(Mlp, (4, 12)), (LazyMlp, (4, 12)), (ConvNet, (4, 2, 8, 8))])
def test_training_is_the_eager_one(net_class: type[nn.Cell], shape: tuple[int, ...], mode: str) -> None:
    """Losses, weights and statistics of ten steps, bit for bit, without a single input size."""
    ms.set_context(mode=MODES[mode])
    x, y = random_input(shape), random_input((4, 3))
    found = []
    for lazy in (False, True):
        seed()
        net = net_class(lazy)
        net.set_train()
        if lazy:
            lazycell.dry_run(net, lazycell.spec(*shape))
        found.append((net, train(net, x, y)))
    assert found[0][1] == found[1][1]
    assert_same_values(found[0][0], found[1][0])


def train(net: nn.Cell, x: Tensor, y: Tensor) -> list[object]:
    """The losses of ten steps."""
    optimizer = nn.Momentum(nn.Cell.trainable_params(net), 0.05, 0.9)
    step = nn.TrainOneStepCell(nn.WithLossCell(net, nn.MSELoss()), optimizer)
    return [bits(step(x, y)) for _ in range(10)]


def test_unsized_parameters_are_known_as_such() -> None:
    """Sizes count 0 as long as nobody knows them."""
    layer = LazyDense(3)
    assert all(map(_unsized.is_unsized, layer.get_parameters()))
    assert [_unsized.num_bytes(p) for p in layer.get_parameters()] == [0, 0]
    layer(ones(2, 5))
    assert [_unsized.num_bytes(p) for p in layer.get_parameters()] == [60, 12]
