"""The same work in PyTorch, JAX and Paddle; imported by the processes that measure them, and by nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks import _measure

Step = Callable[[], object]


def peak(function: Callable[..., Step], args: Sequence[Any]) -> int:
    """How far one call raises this process's peak; the framework is loaded before."""
    return _measure.peak(function(*args))


# ---------------------------------------------------------------------------------------------
# Construction


def torch_construction(live: int, dead: int, width: int, meta: bool, call: bool = False) -> Step:
    """Build Linear layers, and call the live ones if that is asked and possible."""
    import torch

    torch.nn.Linear(8, 8)(torch.ones(1, 8))

    def work() -> object:
        with torch.device("meta" if meta else "cpu"):
            layers = [torch.nn.Linear(width, width) for _ in range(live + dead)]
        if call and not meta:
            torch.nn.Sequential(*layers[:live])(torch.ones(1, width))
        return layers

    return work


def paddle_construction(live: int, dead: int, width: int, lazy: bool, call: bool = False) -> Step:
    """Build Linear layers, and initialize and call the live ones if that is asked."""
    import contextlib

    import paddle

    paddle.set_device("cpu")
    paddle.nn.Linear(8, 8)(paddle.ones([1, 8]))

    def work() -> object:
        with paddle.LazyGuard() if lazy else contextlib.nullcontext():
            layers = [paddle.nn.Linear(width, width) for _ in range(live + dead)]
        if call:
            for layer in layers[:live] if lazy else ():
                for parameter in layer.parameters():
                    parameter.initialize()
            paddle.nn.Sequential(*layers[:live])(paddle.ones([1, width]))
        return layers

    return work


# ---------------------------------------------------------------------------------------------
# A training step with dead branches


def torch_training(dead: int, width: int, depth: int, batch: int) -> Step:
    """A step of AdamW on one live branch beside dead ones."""
    import torch

    def branch() -> torch.nn.Module:
        layers = [torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.ReLU()) for _ in range(depth)]
        return torch.nn.Sequential(*layers)

    live, net = branch(), torch.nn.ModuleList()
    net.extend([live, *(branch() for _ in range(dead))])
    optimizer = torch.optim.AdamW(net.parameters(), 1e-3, weight_decay=0.01)
    x = torch.rand(batch, width)

    def step() -> object:
        optimizer.zero_grad()
        live(x).mean().backward()
        optimizer.step()
        return None

    for _ in range(3):
        step()
    return step


def torch_training_peak(dead: int, width: int, depth: int, batch: int) -> int:
    """How far building that and three steps raise this process's peak."""
    torch_training(0, 8, depth, 8)
    return _measure.peak(lambda: torch_training(dead, width, depth, batch))


# ---------------------------------------------------------------------------------------------
# Freezing


def torch_freezing(net: str, frozen: int, batch: int) -> Step:
    """A gradient step with the first stages frozen by ``requires_grad_(False)``."""
    import torch

    def conv(inner: int, outer: int) -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Conv2d(inner, outer, 3, padding=1), torch.nn.ReLU())

    def dense(width: int) -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.ReLU())

    if net == "MLP":
        stages, x = [dense(768) for _ in range(12)], torch.rand(batch, 768)
    else:
        stages, x = [conv(3, 32), *(conv(32, 32) for _ in range(5))], torch.rand(batch, 3, 32, 32)
    for stage in stages[:frozen]:
        stage.requires_grad_(False)
    chain = torch.nn.Sequential(*stages)
    weights = [p for p in chain.parameters() if p.requires_grad]

    def step() -> object:
        return torch.autograd.grad(chain(x).sum(), weights)

    step()
    return step


def jax_freezing(net: str, frozen: int, batch: int) -> Step:
    """The same in JAX: the gradient of a jitted function with respect to the last stages only."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    random = np.random.default_rng(0)

    def make(*shape: int) -> Any:
        return jax.numpy.asarray(random.random(shape, np.float32) * 0.05)

    if net == "MLP":
        weights = [(make(768, 768), make(768)) for _ in range(12)]
        x = make(batch, 768)
    else:
        weights = [(make(32, 32 if index else 3, 3, 3), make(1, 32, 1, 1)) for index in range(6)]
        x = make(batch, 3, 32, 32)

    def stage(w: Any, b: Any, x: Any) -> Any:
        if net == "MLP":
            return jax.nn.relu(x @ w + b)
        return jax.nn.relu(jax.lax.conv(x, w, (1, 1), "SAME") + b)

    def loss(trainable: Any, fixed: Any, x: Any) -> Any:
        for w, b in [*fixed, *trainable]:
            x = stage(w, b, x)
        return x.sum()

    grad = jax.jit(jax.grad(loss))
    fixed, trainable = weights[:frozen], weights[frozen:]

    def step() -> object:
        return jax.block_until_ready(grad(trainable, fixed, x))

    step()
    return step
