"""Parts of training scripts written for plain MindSpore, as their authors would write them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import ParameterTuple, Tensor, nn, ops

X = np.random.default_rng(0).random((8, 6), np.float32)
Y = np.random.default_rng(1).random((8, 2), np.float32)


class Net(nn.Cell):
    """Two of its layers are dead; ``Pruned`` is the same without them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Dense(6, 5)
        self.dead = nn.Dense(6, 7)
        self.norm = nn.LayerNorm((5,))
        self.blocks = nn.CellList([nn.Dense(5, 5), nn.Dense(5, 5)])
        self.head = nn.Dense(5, 2)

    def construct(self, x: Tensor) -> Tensor:
        return self.head(self.blocks[0](ops.relu(self.norm(self.stem(x)))))


DEAD = {"dead.weight", "dead.bias", "blocks.1.weight", "blocks.1.bias"}


class Pruned(nn.Cell):
    """What is left of a `Net` if its author takes out by hand what is never called."""

    def __init__(self, net: Net) -> None:
        super().__init__(auto_prefix=False)
        self.stem, self.norm, self.block, self.head = net.stem, net.norm, net.blocks[0], net.head

    def construct(self, x: Tensor) -> Tensor:
        return self.head(self.block(ops.relu(self.norm(self.stem(x)))))


def loss_of(net: nn.Cell) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The usual forward function."""
    loss_fn = nn.MSELoss()

    def forward_fn(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        out = net(x)
        return loss_fn(out, y), out

    return forward_fn


def usual_loop(net: nn.Cell, optimizer: Any, steps: int = 20) -> list[float]:
    """The usual loop."""
    grad_fn = ms.value_and_grad(loss_of(net), None, optimizer.parameters, has_aux=True)
    losses = []
    for _ in range(steps):
        (loss, _), grads = grad_fn(Tensor(X), Tensor(Y))
        optimizer(grads)
        losses.append(float(loss.asnumpy()))
    return losses


def one_step_cell(net: nn.Cell, optimizer: Any, steps: int = 4) -> list[float]:
    """MindSpore's own training cell."""
    step = nn.TrainOneStepCell(nn.WithLossCell(net, nn.MSELoss()), optimizer)
    step.set_train()
    return [float(step(Tensor(X), Tensor(Y)).asnumpy()) for _ in range(steps)]


def jitted(net: nn.Cell, optimizer: Any, steps: int = 4) -> list[float]:
    """A step in one graph."""
    grad_fn = ms.value_and_grad(loss_of(net), None, optimizer.parameters, has_aux=True)

    @ms.jit
    def step(x: Tensor, y: Tensor) -> Tensor:
        (loss, _), grads = grad_fn(x, y)
        optimizer(grads)
        return loss

    return [float(step(Tensor(X), Tensor(Y)).asnumpy()) for _ in range(steps)]


class OwnStep(nn.Cell):
    """A training cell of the author's own."""

    def __init__(self, network: nn.Cell, optimizer: nn.Cell) -> None:
        super().__init__(auto_prefix=False)
        self.network = network
        self.network.set_grad()
        self.optimizer = optimizer
        self.weights = ParameterTuple(network.trainable_params())
        self.grad = ops.GradOperation(get_by_list=True)

    def construct(self, x: Tensor, y: Tensor) -> Tensor:
        loss = self.network(x, y)
        grads = self.grad(self.network, self.weights)(x, y)
        return ops.depend(loss, self.optimizer(grads))


def own_step_cell(net: nn.Cell, optimizer: Any, steps: int = 4) -> list[float]:
    """A training cell of the author's own, with MindSpore's oldest gradient function."""
    step = OwnStep(nn.WithLossCell(net, nn.MSELoss()), optimizer)
    return [float(step(Tensor(X), Tensor(Y)).asnumpy()) for _ in range(steps)]


def tuple_of_parameters(net: nn.Cell, optimizer: Any, steps: int = 4) -> list[float]:
    """Weights in a tuple that was made before anything ran, and gradients that are clipped."""
    weights = ParameterTuple(net.trainable_params())
    grad_fn = ms.value_and_grad(loss_of(net), None, weights, has_aux=True)
    losses = []
    for _ in range(steps):
        (loss, _), grads = grad_fn(Tensor(X), Tensor(Y))
        assert len(grads) == len(weights)
        optimizer(ops.clip_by_global_norm(grads, 10.0))
        losses.append(float(loss.asnumpy()))
    return losses


def model_train(net: nn.Cell, optimizer: Any) -> list[float]:
    """``Model.train`` and ``Model.eval``."""
    data = ms.dataset.NumpySlicesDataset((X, Y), ["x", "y"], shuffle=False).batch(4)
    model = ms.Model(net, nn.MSELoss(), optimizer, metrics={"loss": nn.Loss()})
    model.train(2, data, dataset_sink_mode=False)
    return [model.eval(data, dataset_sink_mode=False)["loss"]]


LOOPS = (usual_loop, one_step_cell, jitted, own_step_cell, tuple_of_parameters, model_train)


class ClippedStep(nn.TrainOneStepCell):
    """A training cell that looks at single gradients, and clips all."""

    def construct(self, x: Tensor, y: Tensor) -> Tensor:
        loss = self.network(x, y)
        sens = ops.fill(loss.dtype, loss.shape, 1.0)
        grads = self.grad(self.network, self.weights)(x, y, sens)
        norm = ops.reduce_sum(ops.abs(grads[0]))
        grads = ops.clip_by_global_norm(grads, 1.0)
        return ops.depend(loss, self.optimizer(grads)) + 0.0 * norm


class GradientInside(nn.Cell):
    """A gradient function that is made where it is used."""

    def __init__(self, net: nn.Cell) -> None:
        super().__init__()
        self.net = net

    def construct(self, x: Tensor) -> Tensor:
        return ms.grad(self.net)(x)
