"""Life around a net: copies, checkpoints, hooks, precision, recomputation."""

from __future__ import annotations

import copy
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
from helpers import assert_same_values, bits, both, deferred, names, ones, seed, touched
from mindspore import Tensor, nn

import lazycell

pytestmark = pytest.mark.filterwarnings("ignore::lazycell.UnusedLayerWarning")

X = ones(2, 4)


def make(base: type[nn.Cell]) -> nn.Cell:
    """A net with used and unused layers of several kinds."""

    class Model(base):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.SequentialCell(nn.Dense(4, 4), nn.BatchNorm1d(4), nn.ReLU())
            self.aux = nn.SequentialCell(nn.Dense(4, 3), nn.LSTM(3, 2))
            self.head = nn.Dense(4, 2)

        def construct(self, x: Tensor) -> Tensor:
            return self.head(self.body(x))

    return Model()


LIVE = ["body.0.weight", "body.0.bias", "body.1.gamma", "body.1.beta", "head.weight", "head.bias"]


class TestDeepcopy:
    """Copies are independent, stay deferred, and have the same values."""

    def test_before_touching(self) -> None:
        """A copy that is trained leaves the original as it was."""
        eager, net = both(make)
        copied = copy.deepcopy(net)
        assert deferred(copied) == deferred(net) == {p.name for p in net.get_parameters()}
        copied(X)
        assert names(copied.trainable_params()) == LIVE and not touched(net)
        assert lazycell.registry(net).touched == ()
        assert_same_values(eager, net)
        assert [bits(p) for p in copied.trainable_params()] == [
            bits(p) for p in eager.get_parameters() if p.name in LIVE
        ]

    def test_after_touching(self) -> None:
        """What was touched is touched in the copy, with the trained values; the rest stays deferred."""
        _, net = both(make)
        net(X)
        net.head.weight.set_data(net.head.weight + 1)
        copied = copy.deepcopy(net)
        assert names(copied.trainable_params()) == LIVE
        assert deferred(copied) == deferred(net) != set()
        assert bits(copied.head.weight) == bits(net.head.weight)
        copied.aux[0](X)
        assert not {"aux.0.weight"} & touched(net) and {"aux.0.weight"} <= touched(copied)
        assert_same_values(copied, net)

    def test_of_a_container(self) -> None:
        """A net inside other structures, twice, stays one net."""
        _, net = both(make)
        first, (second,) = copy.deepcopy((net, [net]))
        assert first is second and first is not net
        first(X)
        assert names(first.trainable_params()) == LIVE

    def test_of_a_copy(self) -> None:
        """Copies of copies, as ensembles and averaged models make them."""
        eager, net = both(make)
        for _ in range(3):
            net = copy.deepcopy(net)
        assert_same_values(eager, net)


class TestCheckpoints:
    """Saving and loading in both directions."""

    def trained(self) -> nn.Cell:
        """An eager net with values of its own."""
        seed(9)
        net = make(nn.Cell)
        for parameter in net.get_parameters():
            parameter.set_data(parameter + 0.5)
        return net

    @pytest.mark.parametrize("how", ["load_param_into_net", "load_checkpoint", "load_state_dict"])
    def test_a_full_checkpoint_before_the_first_call(self, tmp_path: Path, how: str) -> None:
        """It is loaded whole, touches nothing, and isn't overwritten by later touching."""
        source, path = self.trained(), str(tmp_path / "full.ckpt")
        ms.save_checkpoint(source, path)
        _, net = both(make)
        if how == "load_state_dict":
            net.load_state_dict(source.state_dict())
        elif how == "load_checkpoint":
            ms.load_checkpoint(path, net)
        else:
            assert ms.load_param_into_net(net, ms.load_checkpoint(path)) == ([], [])
        assert not touched(net) and not deferred(net)
        assert bits(net(X)) == bits(source(X))
        assert_same_values(source, net)

    def test_touched_only_into_an_eager_twin(self, tmp_path: Path) -> None:
        """The twin reports exactly the untouched names."""
        _, net = both(make)
        net(X)
        path = str(tmp_path / "touched.ckpt")
        touched_parameters = [p for p in net.get_parameters() if p.name in touched(net)]
        ms.save_checkpoint([{"name": p.name, "data": p} for p in touched_parameters], path)
        dead = deferred(net)
        missing, extra = ms.load_param_into_net(make(nn.Cell), ms.load_checkpoint(path))
        assert set(missing) == dead == deferred(net) != set() and extra == []

    def test_touched_only_by_a_choice_function(self, tmp_path: Path) -> None:
        """MindSpore's own way to save a part of a net leaves the rest without storage."""
        _, net = both(make)
        net(X)
        dead = deferred(net)
        ms.save_checkpoint(net, str(tmp_path / "part.ckpt"), choice_func=lambda name: name not in dead)
        assert deferred(net) == dead != set()
        assert not dead & set(ms.load_checkpoint(str(tmp_path / "part.ckpt")))
        net.init_parameters_data()  # what the user asks for by himself is done
        assert not deferred(net)

    def test_saving_all_saves_the_eager_values(self, tmp_path: Path) -> None:
        """A full checkpoint of a lazy net is the eager net's."""
        eager, net = both(make)
        net(X), eager(X)
        for name, cell in (("eager", eager), ("lazy", net)):
            ms.save_checkpoint(cell, str(tmp_path / name))
        first, second = (ms.load_checkpoint(str(tmp_path / f"{name}.ckpt")) for name in ("eager", "lazy"))
        assert list(first) == list(second)
        assert {name: bits(p) for name, p in first.items()} == {name: bits(p) for name, p in second.items()}

    def test_state_dict_allocates_nothing(self) -> None:
        """It lists the parameters themselves."""
        eager, net = both(make)
        assert list(net.state_dict()) == list(eager.state_dict())
        assert len(deferred(net)) == len(list(net.get_parameters()))


class TestSettings:
    """What is set on a net before its first call holds."""

    def test_train_flag(self) -> None:
        """BatchNorm moves its statistics in training, bit for bit as in the eager net."""
        eager, net = both(make)
        for cell in (eager, net):
            cell.set_train()
            cell(X)
            cell.set_train(False)
        assert bits(eager(X)) == bits(net(X))
        assert_same_values(eager, net)

    def test_to_float(self) -> None:
        """Half precision, set before the first call."""
        eager, net = both(lambda base: make(base).to_float(ms.float16))
        assert eager(X).dtype == net(X).dtype == ms.float16
        assert bits(eager(X)) == bits(net(X))

    def test_set_grad_and_apply(self) -> None:
        """``set_grad`` and ``apply`` reach every cell once."""
        eager, net = both(make)
        visits: list[list[str]] = [[], []]
        for cell, seen in zip((eager, net), visits):
            cell.apply(lambda cell, seen=seen: seen.append(type(cell).__name__))
        assert visits[0] == visits[1]
        net.set_grad()
        net(X)
        assert names(net.trainable_params()) == LIVE

    def test_requires_grad_before_the_first_call(self) -> None:
        """A frozen parameter is touched, and not listed."""
        _, net = both(make)
        net.head.weight.requires_grad = False
        net(X)
        assert names(net.trainable_params()) == [name for name in LIVE if name != "head.weight"]
        assert "head.weight" in touched(net)

    def test_recompute(self) -> None:
        """Recomputed layers give the eager gradients from the first call on."""

        def recomputed(base: type[nn.Cell]) -> nn.Cell:
            net = make(base)
            net.body.recompute()
            return net

        eager, net = both(recomputed)
        weights = [p for p in eager.trainable_params() if p.name in LIVE]
        live = net.trainable_params()
        for _ in range(2):
            _, expected = ms.value_and_grad(lambda x: eager(x).sum(), None, weights)(X)
            _, gradients = ms.value_and_grad(lambda x: net(x).sum(), None, live)(X)
            assert [bits(g) for g in expected] == [bits(g) for g in gradients]
        assert names(live) == LIVE


class TestHooks:
    """Hooks registered before the first call run in each call, as often as with ``nn.Cell``."""

    def test_forward_and_backward_hooks(self) -> None:
        """Forward, pre-forward and backward hooks, on the root and on a layer."""
        logs: list[list[str]] = []
        for base in (nn.Cell, lazycell.LazyCell):
            seed()
            net, log = make(base), []
            logs.append(log)
            for name, cell in (("net", net), ("head", net.head)):
                cell.register_forward_pre_hook(lambda c, inputs, name=name, log=log: log.append(f"pre {name}"))
                cell.register_forward_hook(lambda c, inputs, out, name=name, log=log: log.append(f"post {name}"))
                cell.register_backward_hook(lambda c, gi, go, name=name, log=log: log.append(f"back {name}"))
            for _ in range(2):
                ms.grad(lambda x, net=net: net(x).sum())(X)
        assert logs[0] == logs[1] and len(logs[0]) == 12

    def test_a_hook_that_changes_the_output(self) -> None:
        """Its result is the result."""
        _, net = both(make)
        handle = net.head.register_forward_hook(lambda cell, inputs, output: output * 0)
        assert not net(X).asnumpy().any()
        handle.remove()
        assert net(X).asnumpy().any()

    def test_parameter_hooks_survive_materialization(self) -> None:
        """A gradient hook registered on a deferred parameter is called."""
        _, net = both(make)
        seen: list[tuple[int, ...]] = []
        net.head.weight.register_hook(lambda gradient: seen.append(gradient.shape))
        assert "head.weight" in deferred(net)
        ms.value_and_grad(lambda x: net(x).sum(), None, net.trainable_params())(X)
        assert seen == [(2, 4)]


def test_gradients_of_inputs_and_higher_orders() -> None:
    """``grad``, second order, ``vjp`` and ``jvp`` over a net that has never run."""

    def smooth(base: type[nn.Cell]) -> nn.Cell:
        class Model(base):
            def __init__(self) -> None:
                super().__init__()
                self.a, self.b = nn.Dense(4, 4), nn.Dense(4, 4)

            def construct(self, x: Tensor) -> Tensor:
                return self.a(x).tanh()

        return Model()

    def derivatives(net: nn.Cell, which: str) -> list[object]:
        def function(x: Tensor) -> Tensor:
            return net(x).sum()

        if which == "grad":
            return [bits(ms.grad(function)(X))]
        if which == "second":
            return [bits(ms.grad(lambda x: ms.grad(function)(x).sum())(X))]
        if which == "vjp":
            return [bits(ms.vjp(function, X)[1](Tensor(np.float32(1.0)))[0])]
        return [bits(out) for out in ms.jvp(function, X, X)]

    for which in ("grad", "second", "vjp", "jvp"):
        eager, net = both(smooth)
        assert derivatives(eager, which) == derivatives(net, which), which
        assert names(net.trainable_params()) == ["a.weight", "a.bias"]
