"""What each process of a data-parallel run does; test_distributed.py starts it with ``msrun``.

``python ranks.py FOLDER NAME ...`` runs the functions below of these names, one after the other, and leaves what each
returns in ``FOLDER/NAME.RANK.json``.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import re
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops
from mindspore.communication import get_rank, init

import lazycell
from lazycell import _deferral, _mindspore
from lazycell.distributed import sync_touched


class Net(lazycell.LazyCell):
    """The data decides between left and right; late is an argument; dead is never called."""

    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.stem = nn.Dense(6, width)
        self.left = nn.Dense(width, 5)
        self.right = nn.SequentialCell(nn.Dense(width, 7), nn.LayerNorm((7,)), nn.Dense(7, 5))
        self.late = nn.Dense(5, 5)
        self.dead = nn.Dense(6, 7)
        self.head = nn.Dense(5, 2)

    def construct(self, x: Tensor, late: bool = False) -> Tensor:
        h = ops.relu(self.stem(x))
        h = self.left(h) if x.sum() > 18 else self.right(h)
        if late:
            h = self.late(h)
        return self.head(h)


class Switched(lazycell.LazyCell):
    """For Graph mode: a constant decides."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Dense(6, 5)
        self.late = nn.Dense(5, 5)
        self.dead = nn.Dense(6, 7)
        self.head = nn.Dense(5, 2)

    def construct(self, x: Tensor, late: bool = False) -> Tensor:
        h = ops.relu(self.stem(x))
        if late:
            h = self.late(h)
        return self.head(h)


class Plain(nn.Cell):
    """For the patch."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Dense(6, 5)
        self.right = nn.Dense(6, 5)
        self.dead = nn.Dense(6, 7)

    def construct(self, x: Tensor) -> Tensor:
        return self.left(x) if x.sum() > 18 else self.right(x)


class Recurrent(lazycell.LazyCell):
    """Values that no seed gives."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Dense(4, 4)
        self.used = nn.LSTM(4, 3)
        self.dead = nn.LSTM(4, 2)
        self.other = nn.Dense(4, 2)

    def construct(self, x: Tensor) -> Tensor:
        return self.used(self.dense(x))[0]


def batch(step: int) -> list[tuple[Tensor, Tensor, bool]]:
    """The joint batch of a step, in two parts: inputs, labels, and whether the late layer is reached."""
    random = np.random.default_rng(step)
    made = []
    for part, scale in enumerate(random.choice([0.5, 1.0], 2)):
        x = Tensor((random.random((8, 6)) * scale).astype(np.float32))
        y = Tensor(random.random((8, 2)).astype(np.float32))
        made.append((x, y, part == 0 and step >= 10 and step % 3 == 1))
    return made


def seed(value: int = 0) -> None:
    """Put the random streams where a fresh run with this seed has them."""
    ms.set_seed(value)
    np.random.seed(value)


def bits(parameters: Any) -> dict[str, str]:
    """A digest of each parameter's value, by name."""
    return {p.name: hashlib.sha256(p.asnumpy().tobytes()).hexdigest()[:16] for p in parameters}


def deferred(net: nn.Cell) -> list[str]:
    """The names of what has no storage."""
    return [p.name for p in net.get_parameters() if _deferral.is_deferred(p)]


@contextmanager
def counted() -> Iterator[list[int]]:
    """How many numbers each AllReduce, AllGather and Broadcast took meanwhile."""
    sizes: list[int] = []
    names = ("sum_over_ranks", "gather_from_ranks", "bytes_of_first_rank")
    before = {name: getattr(_mindspore, name) for name in names}

    def counting(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return lambda given: (sizes.append(len(given)), function(given))[1]

    for name, function in before.items():
        setattr(_mindspore, name, counting(function))
    try:
        yield sizes
    finally:
        for name, function in before.items():
            setattr(_mindspore, name, function)


def error_of(function: Callable[[], Any]) -> str:
    """What a call says that fails."""
    try:
        function()
    except lazycell.LazyCellError as error:
        return str(error)
    return "no error"


# ---------------------------------------------------------------------------------------------
# Training


def adam(net: nn.Cell) -> Any:
    """With moments, and decay."""
    return lazycell.LazyOptimizer(nn.Adam, net, 1e-2, weight_decay=0.1)


def grouped(net: nn.Cell) -> Any:
    """Groups that a predicate makes."""
    groups = [{"params": lambda p: p.ndim < 2, "weight_decay": 0.0}, {"params": net, "weight_decay": 0.1}]
    return lazycell.LazyOptimizer(nn.AdamWeightDecay, groups, 1e-2)


def result(net: nn.Cell, optimizer: Any, active: list[int]) -> dict[str, Any]:
    """What is left of training."""
    trained = [*net.trainable_params(), *optimizer.state_dict().values()]
    values = {p.name: p.asnumpy().tolist() for p in trained}
    return {"bits": bits(trained), "values": values, "active": active, "deferred": deferred(net)}


def train(rank: int | None, make: Callable[[nn.Cell], Any], sync_inside: bool = False) -> dict[str, Any]:
    """Train a net for twenty steps, as one of two ranks, or with None alone, on the joint batch."""
    seed()
    net, loss_fn = Net(), nn.MSELoss()
    optimizer = make(net)

    def forward_fn(step: int) -> Tensor:
        if rank is None:
            return sum(loss_fn(net(x, late), y) for x, y, late in batch(step)) / 2
        x, y, late = batch(step)[rank]
        loss = loss_fn(net(x, late), y)
        if sync_inside:
            sync_touched(net)
        return loss

    grad_fn = lazycell.value_and_grad(forward_fn, None, optimizer.parameters)
    reducer = None
    active = []
    if not sync_inside:
        sync_touched(net)
    for step in range(20):
        _, grads = grad_fn(step)
        active.append(sum(grads.active))
        if rank is not None:
            if sync_touched(net) or reducer is None or len(reducer.allreduce_filter) != len(grads):
                reducer = nn.DistributedGradReducer(optimizer.parameters, mean=True)
            grads = reducer(grads)
        optimizer(grads)
    return result(net, optimizer, active)


def trained_with_adam(rank: int) -> dict[str, Any]:
    """Synchronized after gradients."""
    return train(rank, adam)


def trained_in_groups(rank: int) -> dict[str, Any]:
    """Synchronized after gradients."""
    return train(rank, grouped)


def trained_inside(rank: int) -> dict[str, Any]:
    """Synchronized inside the function that is differentiated."""
    return train(rank, adam, sync_inside=True)


def train_graph(rank: int | None) -> dict[str, Any]:
    """Train in Graph mode, where the late layer is a constant's choice."""
    seed()
    net, loss_fn = Switched(), nn.MSELoss()
    optimizer = adam(net)
    ms.set_context(mode=ms.GRAPH_MODE)

    def forward_fn(x: Tensor, y: Tensor, late: bool) -> Tensor:
        return loss_fn(net(x, late), y)

    def both_fn(x: Tensor, y: Tensor, late: bool, x1: Tensor, y1: Tensor, late1: bool) -> Tensor:
        return (loss_fn(net(x, late), y) + loss_fn(net(x1, late1), y1)) / 2

    grad_fn = lazycell.value_and_grad(both_fn if rank is None else forward_fn, None, optimizer.parameters)
    lazycell.dry_run(net, lazycell.spec(8, 6))
    sync_touched(net)
    reducer = None
    active = []
    for step in range(20):
        one, other = batch(step)
        _, grads = grad_fn(*one, *other) if rank is None else grad_fn(*batch(step)[rank])
        active.append(sum(grads.active))
        if rank is not None:
            if sync_touched(net) or reducer is None or len(reducer.allreduce_filter) != len(grads):
                reducer = nn.DistributedGradReducer(optimizer.parameters, mean=True)
            grads = reducer(grads)
        optimizer(grads)
    return result(net, optimizer, active)


def trained_in_graph_mode(rank: int) -> dict[str, Any]:
    """Synchronized after gradients."""
    return train_graph(rank)


def trained_by_mindspore(rank: int) -> dict[str, Any]:
    """MindSpore's own gradient function, synchronized inside; an optimizer that was built after a first pass."""
    net, loss_fn = Net(), nn.MSELoss()

    def forward_fn(step: int) -> Tensor:
        x, y, late = batch(step)[rank]
        loss = loss_fn(net(x, late), y)
        sync_touched(net)
        return loss

    grad_fn = ms.value_and_grad(forward_fn, None, net.trainable_params())
    optimizer = lazycell.LazyOptimizer(nn.Momentum, net, 0.1, 0.9)
    counts = []
    for step in range(12):
        _, grads = grad_fn(step)
        counts.append(len(grads))
        optimizer(nn.DistributedGradReducer(net.trainable_params(), mean=True)(grads))
    return {"bits": bits(net.trainable_params()), "counts": counts, "deferred": deferred(net)}


def trained_under_the_patch(rank: int) -> dict[str, Any]:
    """A script for plain MindSpore, with one line more."""
    with lazycell.patch():
        net = nn.SequentialCell(Plain())
        optimizer = nn.Adam(net.trainable_params(), 1e-2)
        grad_fn = ms.value_and_grad(lambda x: net(x).sum(), None, optimizer.parameters)
        sync_touched(net)
        counts = []
        for step in range(6):
            _, grads = grad_fn(batch(step)[rank][0])
            sync_touched(net)
            counts.append(len(grads))
            optimizer(nn.DistributedGradReducer(optimizer.parameters, mean=True)(grads))
        return {"bits": bits(net.trainable_params()), "counts": counts, "deferred": deferred(net)}


def readme(rank: int) -> dict[str, Any]:
    """The loop of the README."""
    text = (Path(lazycell.__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```py\n(.*?)```", text, re.DOTALL)

    def forward_fn(x: Tensor, y: Tensor) -> Tensor:
        return nn.MSELoss()(names["net"](x), y)

    def make_dataset(num_shards: int, shard_id: int) -> list[tuple[Tensor, Tensor]]:
        return [batch(step)[shard_id][:2] for step in range(6)]

    names: dict[str, Any] = {"Net": Net, "forward_fn": forward_fn, "make_dataset": make_dataset}
    exec(block.replace("\ninit()\n", "\n"), names)  # it has been called
    trained = [*names["net"].trainable_params(), *names["optimizer"].state_dict().values()]
    return {"bits": bits(trained), "deferred": deferred(names["net"])}


def accumulated(rank: int) -> dict[str, Any]:
    """Two gradients for each step."""
    net = Net()
    optimizer = lazycell.LazyOptimizer(nn.Momentum, net, 0.1, 0.9)
    grad_fn = lazycell.value_and_grad(lambda x, late: net(x, late).sum(), None, optimizer.parameters)
    sync_touched(net)
    for step in range(6, 14, 2):
        total = None
        for part in (step, step + 1):
            x, _, late = batch(part)[rank]
            _, grads = grad_fn(x, late)
            total = grads if total is None else total.add(grads)
        sync_touched(net)
        optimizer(nn.DistributedGradReducer(total.parameters, mean=True)(total))
    return {"bits": bits([*net.trainable_params(), *optimizer.state_dict().values()]), "deferred": deferred(net)}


# ---------------------------------------------------------------------------------------------
# Values


def other_seeds(rank: int) -> dict[str, Any]:
    """Ranks that were seeded differently, synchronized before anything has run; then one that wasn't."""
    seed(rank)
    net = Recurrent()
    sync_touched(net)
    early = deferred(net)
    if rank == 1:
        net(ops.ones((2, 3, 4)))
    names = sync_touched(net)
    seed(rank)
    late = Recurrent()
    late(ops.ones((2, 3, 4)))
    sync_touched(late)
    return {
        "early": early,
        "names": names,
        "bits": bits(p for p in net.get_parameters() if p.name not in deferred(net)),
        "late": bits(p for p in late.get_parameters() if p.name not in deferred(late)),
        "deferred": deferred(net),
        "all": bits(net.get_parameters()),
    }


def loaded(rank: int) -> dict[str, Any]:
    """Rank 0 has loaded values, touched or not; rank 1 has none."""
    net, plain = Net(), lazycell.track(nn.Dense(3, 2))
    if rank == 0:
        net.late.weight.set_data(ops.full((5, 5), 7.0))
    plain.weight.set_data(ops.full((2, 3), float(rank)))
    half = lazycell.track(nn.SequentialCell(nn.Dense(3, 2, dtype=ms.float16)))
    half[0].weight.set_data(ops.full((2, 3), float(rank), dtype=ms.float16))
    sync_touched(net)
    storage = deferred(net)
    net(ops.ones((8, 6)), True)
    for cell in (net, plain, half):
        sync_touched(cell)
    late = net.late.weight.asnumpy()
    shared = bits([plain.weight, half[0].weight, net.late.weight])
    return {"late": float(late.min()), "deferred": storage, "bits": shared}


def added_later(rank: int) -> dict[str, Any]:
    """Layers that come, or get their size, after ranks have been synchronized: under one seed, and under others."""

    def first_gradients(value: int) -> tuple[str, tuple[str, ...]]:
        seed()
        net, x = Switched(), ops.ones((8, 6))
        grad_fn = lazycell.grad(lambda x: net(x).sum(), None, net)
        sync_touched(net)
        grad_fn(x)
        sync_touched(net)
        seed(value)
        net.stem = nn.Dense(6, 5)
        error = error_of(lambda: grad_fn(x))
        return error, sync_touched(net)

    def first_sizes(value: int) -> str:
        seed(value)
        net = Unsized()
        sync_touched(net)
        return error_of(lambda: lazycell.grad(lambda x: net(x, True).sum(), None, net)(ops.ones((8, 6))))

    alike, joined = first_gradients(0)
    other, _ = first_gradients(rank)
    return {"alike": alike, "joined": joined, "other": other, "sizes": [first_sizes(0), first_sizes(rank)]}


def assigned_later(rank: int) -> dict[str, Any]:
    """After the first call, values that a rank assigns to an unused layer, and a layer that one rank alone replaces."""
    seed()
    net, x = Net(), ops.ones((8, 6))
    net(x)
    sync_touched(net)
    net.late.weight.set_data(ops.full((5, 5), float(rank)))
    sync_touched(net)
    net(x, rank == 0)
    names = sync_touched(net)
    if rank == 0:
        net.head = nn.Dense(5, 2)
    replaced = sync_touched(net)
    return {"names": names, "replaced": replaced, "bits": bits([net.late.weight, *net.head.get_parameters()])}


def statistics(rank: int) -> dict[str, Any]:
    """Moving statistics, which each rank gathers from its own data."""
    net = lazycell.track(nn.SequentialCell(nn.Dense(6, 4), nn.BatchNorm1d(4))).set_train()
    sync_touched(net)
    net(batch(0)[rank][0])
    before = bits([net[1].moving_mean])
    sync_touched(net)
    return {"before": before, "after": bits([net[1].moving_mean]), "trained": bits(net.trainable_params())}


# ---------------------------------------------------------------------------------------------
# Synchronizing


def repeated(rank: int) -> dict[str, Any]:
    """What each call returns, and what it costs."""
    net = Net()
    x = ops.ones((8, 6)) * rank
    returned, costs = [], []
    for step in range(5):
        if step == 1:
            net(x)
        if step == 3 and rank == 1:
            net(x, True)
        with counted() as count:
            returned.append(sync_touched(net))
        costs.append(count)
    names = [p.name for p in net.trainable_params()]
    return {"returned": returned, "costs": costs, "names": names, "used": lazycell.registry(net).touched}


def resting(rank: int) -> dict[str, Any]:
    """A layer that no rank reaches any more rests, moments and all; one that a single rank reaches moves on both."""
    net = Net()
    optimizer = adam(net)
    grad_fn = lazycell.grad(lambda x, late: net(x, late).sum(), None, optimizer.parameters)
    x = ops.ones((8, 6))
    sync_touched(net)
    states = []
    for late in (True, False, rank == 0):
        grads = grad_fn(x, late)
        sync_touched(net)
        optimizer(nn.DistributedGradReducer(grads.parameters, mean=True)(grads))
        states.append(bits(p for p in [*net.trainable_params(), *optimizer.state_dict().values()] if "late" in p.name))
    return {"states": states}


def shared(rank: int) -> dict[str, Any]:
    """Tied weights, and a copy that was made before anything ran."""
    net = Net()
    net.late.weight = net.left.weight
    twin = copy.deepcopy(net)
    x = ops.ones((8, 6)) * rank
    for cell in (net, twin):
        cell(x)
        sync_touched(cell)
    return {
        "names": [[p.name for p in cell.trainable_params()] for cell in (net, twin)],
        "tied": [cell.late.weight is cell.left.weight for cell in (net, twin)],
        "bits": [bits(cell.trainable_params()) for cell in (net, twin)],
    }


def frozen(rank: int) -> dict[str, Any]:
    """A layer that all ranks freeze, and one that only one does."""
    net = Net()
    optimizer = adam(net)
    lazycell.freeze(net.stem)
    grad_fn = lazycell.grad(lambda x: net(x).sum(), None, optimizer.parameters)
    sync_touched(net)
    grads = grad_fn(ops.ones((8, 6)) * rank)
    names = [p.name for p in grads.parameters]
    if rank == 1:
        lazycell.freeze(net.head)
    errors = [error_of(lambda: grad_fn(ops.ones((8, 6)))), error_of(lambda: sync_touched(net))]
    return {"names": names, "errors": errors}


def broadcast(rank: int) -> dict[str, Any]:
    """MindSpore's own broadcast of parameters, in Graph mode, with another seed on each rank."""
    seed(rank)
    net = Switched()
    ms.set_auto_parallel_context(parameter_broadcast=True)
    ms.set_context(mode=ms.GRAPH_MODE)
    try:
        nn.WithLossCell(net, nn.MSELoss())(ops.ones((8, 6)), ops.ones((8, 2)))
    finally:
        ms.set_auto_parallel_context(parameter_broadcast=False)
    without = deferred(net)
    return {"deferred": without, "bits": bits(net.get_parameters())}


# ---------------------------------------------------------------------------------------------
# Errors


def unsynced(rank: int) -> list[Any]:
    """Gradients of branches that differ."""
    net = Net()
    x = ops.ones((8, 6)) * rank
    by_list = lazycell.value_and_grad(lambda x: net(x).sum(), None, net)
    errors = [error_of(lambda: by_list(x))]
    sync_touched(net)
    chosen = [net.left.weight, net.head.weight] if rank else [net.head.weight]
    given = lazycell.value_and_grad(lambda x: net(x).sum(), None, chosen)
    errors.append(error_of(lambda: given(x)))
    alike = lazycell.track(Plain())  # layers that MindSpore's reducer can't tell apart
    optimizer = lazycell.LazyOptimizer(nn.SGD, alike, 0.1)
    alike(x)
    step = nn.TrainOneStepCell(nn.WithLossCell(alike, nn.MSELoss()), optimizer)
    before = bits(alike.get_parameters())
    errors.append(error_of(lambda: step(x, ops.ones((8, 5)))))
    return [*errors, before == bits(alike.get_parameters())]


def unequal_nets(rank: int) -> list[str]:
    """Nets that differ in a shape, and in a layer."""
    one = Net(width=5 + rank)
    other = Net()
    if rank == 1:
        other.more = nn.Dense(2, 2)
    return [error_of(lambda: sync_touched(one)), error_of(lambda: sync_touched(other))]


class Unsized(lazycell.LazyCell):
    """Branches that infer their input size."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = lazycell.layers.LazyDense(5), lazycell.layers.LazyDense(5)

    def construct(self, x: Tensor, left: bool) -> Tensor:
        return self.left(x) if left else self.right(x)


def without_sizes(rank: int) -> dict[str, Any]:
    """Layers that infer their size, first each on one rank, then all on all; from another seed on each rank."""
    seed(rank)
    net, x = Unsized(), ops.ones((8, 6))
    first = sync_touched(net)
    net(x, rank == 0)
    error = error_of(lambda: sync_touched(net))
    for layer in (net.left, net.right):
        lazycell.dry_run(layer, lazycell.spec(8, 6))
    names = sync_touched(net)
    return {"first": first, "error": error, "names": names, "bits": bits(net.get_parameters())}


def elsewhere(rank: int) -> str:
    """An exception in a forward pass, which one rank catches, and goes on to synchronize."""
    net = Net()

    def forward_fn(x: Tensor) -> Tensor:
        loss = net(x).sum()
        if rank == 1:
            raise ZeroDivisionError
        return loss

    try:
        return error_of(lambda: lazycell.grad(forward_fn, None, net)(ops.ones((8, 6))))
    except ZeroDivisionError:
        return error_of(lambda: sync_touched(net))


def not_in_data_parallel(rank: int) -> list[str]:
    """Gradients that one rank alone computes, outside data parallelism."""
    ms.set_auto_parallel_context(parallel_mode="stand_alone")
    try:
        net = Net()
        return [p.name for p in lazycell.grad(net, None, net)(ops.ones((8, 6))).parameters] if rank else []
    finally:
        ms.set_auto_parallel_context(parallel_mode="data_parallel")


# ---------------------------------------------------------------------------------------------
# Ends


def killed(rank: int) -> None:
    """Rank 1 comes to an end in its third step."""
    net = Net()
    grad_fn = lazycell.grad(lambda x: net(x).sum(), None, net)
    for step in range(1000):
        if step == 2 and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        grad_fn(ops.ones((8, 6)))
        sync_touched(net)


def raised(rank: int) -> None:
    """Rank 1 raises an exception, in the middle of a forward pass, which nobody catches."""
    net = Net()

    def forward_fn(step: int) -> Tensor:
        if step == 2 and rank == 1:
            raise KeyboardInterrupt
        return net(ops.ones((8, 6))).sum()

    grad_fn = lazycell.grad(forward_fn, None, net)
    for step in range(1000):
        grad_fn(step)
        sync_touched(net)


def main() -> None:
    """Run what was asked for."""
    folder, *names = sys.argv[1:]
    warnings.simplefilter("ignore", lazycell.UnusedLayerWarning)
    init()
    ms.set_auto_parallel_context(parallel_mode="data_parallel", gradients_mean=True)
    for name in names:
        ms.set_context(mode=ms.PYNATIVE_MODE)
        seed()
        try:
            returned = globals()[name](get_rank())
        except Exception:
            returned = {"failed": traceback.format_exc()}
        Path(folder, f"{name}.{get_rank()}.json").write_text(json.dumps(returned), encoding="utf-8")


if __name__ == "__main__":
    main()
