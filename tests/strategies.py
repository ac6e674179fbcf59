"""Random small nets: a plan drawn by hypothesis, a net built from it, and what that net must touch.

A new kind of layer enters every law by one line in `LAYERS`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import mindspore as ms
import numpy as np
from hypothesis import strategies as st
from mindspore import Parameter, ParameterTuple, Tensor, mint, nn
from mindspore.common.initializer import Initializer, Normal, TruncatedNormal, initializer

import lazycell
from lazycell import layers

WIDTH = 4  # every layer takes and gives (2, 4)


class OwnInitializer(Initializer):
    """A user's initializer, which draws in its own way."""

    def _initialize(self, array: np.ndarray) -> None:
        array[...] = np.random.normal(size=array.shape)


class TwoParameters(nn.Cell):
    """Reads one of its two parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.read = Parameter(initializer(OwnInitializer(), (WIDTH,)), name="read")
        self.unread = Parameter(initializer(Normal(0.3), (WIDTH,)), name="unread")

    def construct(self, x: Tensor) -> Tensor:
        return x + self.read


class Pair(nn.Cell):
    """Keeps its parameters where a read can't be seen."""

    def __init__(self) -> None:
        super().__init__()
        weights = [Parameter(Tensor(np.random.rand(WIDTH).astype(np.float32)), name=name) for name in "pq"]
        self.pair = ParameterTuple(weights)

    def construct(self, x: Tensor) -> Tensor:
        return x * self.pair[0] + self.pair[1]


class Recurrent(nn.Cell):
    """A layer whose parameters are built from data."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH)

    def construct(self, x: Tensor) -> Tensor:
        return self.lstm(x.reshape(1, 2, WIDTH))[0].reshape(2, WIDTH)


def _reinitialized() -> nn.Cell:
    layer = nn.Dense(WIDTH, WIDTH)
    layer.weight.set_data(initializer(TruncatedNormal(0.02), layer.weight.shape, layer.weight.dtype))
    layer.bias.set_data(initializer("ones", layer.bias.shape, layer.bias.dtype))
    return layer


def _scaled() -> nn.Cell:
    layer = nn.Dense(WIDTH, WIDTH)
    layer.weight.set_data(layer.weight * 0.5)
    return layer


@dataclass(frozen=True)
class LayerKind:
    """How to create a kind of layer, and which of its parameters are left alone when it is called."""

    name: str
    create: Callable[[], nn.Cell]
    unread: tuple[str, ...] = ()
    readable: str | None = None  # a parameter of shape (4,) or (4, 4) that can be read without a call
    infer: Callable[[], nn.Cell] | None = None  # creates it as a layer that infers its size, in nets on `LazyCell`


LAYERS = (
    LayerKind("Dense", lambda: nn.Dense(WIDTH, WIDTH), readable="weight"),
    LayerKind("Dense, own initializers", lambda: nn.Dense(WIDTH, WIDTH, Normal(0.5), "ones"), readable="bias"),
    LayerKind("Dense, re-initialized", _reinitialized, readable="weight"),
    LayerKind("Dense, scaled", _scaled, readable="weight"),
    LayerKind("Linear", lambda: mint.nn.Linear(WIDTH, WIDTH), readable="weight"),
    LayerKind("LayerNorm", lambda: nn.LayerNorm((WIDTH,)), readable="gamma"),
    LayerKind("BatchNorm1d", lambda: nn.BatchNorm1d(WIDTH), readable="beta"),
    LayerKind("PReLU", lambda: nn.PReLU(WIDTH)),
    LayerKind("ReLU", nn.ReLU),
    LayerKind("HSwish", nn.HSwish),
    LayerKind("two parameters", TwoParameters, unread=("unread",), readable="read"),
    LayerKind("ParameterTuple", Pair),
    LayerKind("LSTM", Recurrent),
    LayerKind("LazyDense", lambda: nn.Dense(WIDTH, WIDTH), infer=lambda: layers.LazyDense(WIDTH)),
    LayerKind("LazyBatchNorm1d", lambda: nn.BatchNorm1d(WIDTH), infer=layers.LazyBatchNorm1d),
)


@dataclass(frozen=True)
class Leaf:
    """A layer of one of the kinds in `LAYERS`."""

    kind: LayerKind

    def __repr__(self) -> str:
        return f"<{self.kind.name}>"


@dataclass(frozen=True)
class Block:
    """A cell with children, and what its ``construct`` does with them, in order.

    ``uses`` are pairs of a child's position and how it is used: "call", "construct", or "read" a parameter of it.
    """

    children: tuple[Leaf | Block, ...]
    uses: tuple[tuple[int, str], ...]
    lazy: bool  # inner blocks may be plain cells
    in_list: bool  # whether the children are kept in a CellList
    shares: int | None  # the position of a child that is kept under a second name as well


Plan = Leaf | Block


class _Net(nn.Cell):
    """What the two kinds of block do alike; ``construct`` can be compiled as well."""

    def build(self, plan: Block, base: type[nn.Cell]) -> None:
        children = [build(child, base) for child in plan.children]
        if plan.in_list:
            self.blocks = nn.CellList(children)
        else:
            for position, child in enumerate(children):
                setattr(self, f"child{position}", child)
        if plan.shares is not None:
            self.shared = children[plan.shares]
        self.in_list = plan.in_list
        readable = [child.kind.readable if isinstance(child, Leaf) else None for child in plan.children]
        self.uses = tuple(
            (position, f"child{position}", how, readable[position] or "")
            for position, how in plan.uses
            if how != "read" or readable[position]
        )

    def child(self, position: int) -> nn.Cell:
        return self.blocks[position] if self.in_list else getattr(self, f"child{position}")

    def construct(self, x: Tensor) -> Tensor:
        for position, name, how, readable in self.uses:
            child = self.blocks[position] if self.in_list else getattr(self, name)
            if how == "call":
                x = child(x)
            elif how == "construct":
                x = child.construct(x)
            else:
                x = x + getattr(child, readable)[:4].sum()
        return x


class PlainNet(_Net):
    """A block on ``nn.Cell``."""

    def __init__(self, plan: Block, base: type[nn.Cell]) -> None:
        super().__init__()
        self.build(plan, base)


class LazyNet(_Net, lazycell.LazyCell):
    """A block on ``LazyCell``."""

    def __init__(self, plan: Block, base: type[nn.Cell]) -> None:
        super().__init__()
        self.build(plan, base)


def build(plan: Plan, base: type[nn.Cell], root: bool = False) -> nn.Cell:
    """A net from a plan, on ``nn.Cell`` or on ``LazyCell``."""
    if isinstance(plan, Leaf):
        infers = base is lazycell.LazyCell and plan.kind.infer is not None
        return plan.kind.infer() if infers else plan.kind.create()
    lazy = base is lazycell.LazyCell and (root or plan.lazy)
    return (LazyNet if lazy else PlainNet)(plan, base)


def must_touch(net: nn.Cell, plan: Plan) -> set[int]:
    """The ids of the parameters that a call of an eager net of this plan uses; knows nothing of lazycell."""
    if isinstance(plan, Leaf):
        return {id(p) for name, p in net.parameters_and_names() if name not in plan.kind.unread}
    used: set[int] = set()
    for position, how in plan.uses:
        child, child_plan = net.child(position), plan.children[position]
        if how != "read":
            used |= must_touch(child, child_plan)
        elif isinstance(child_plan, Leaf) and child_plan.kind.readable is not None:
            used.add(id(getattr(child, child_plan.kind.readable)))
    return used


@st.composite
def _blocks(draw: st.DrawFn, inner: st.SearchStrategy[Plan]) -> Block:
    children = tuple(draw(st.lists(inner, min_size=1, max_size=4)))
    position = st.integers(0, len(children) - 1)
    how = st.sampled_from(("call", "call", "call", "construct", "read"))
    return Block(
        children,
        uses=tuple(draw(st.lists(st.tuples(position, how), max_size=5))),
        lazy=draw(st.booleans()),
        in_list=draw(st.booleans()),
        shares=draw(st.none() | position),
    )


def plans() -> st.SearchStrategy[Block]:
    """Plans of nets: a block whose children are layers or blocks, up to a few levels deep."""
    leaves = st.sampled_from(LAYERS).map(Leaf)
    return _blocks(st.recursive(leaves, _blocks, max_leaves=8))


def inputs() -> Tensor:
    """An input for any net."""
    return Tensor(np.linspace(-1, 1, 2 * WIDTH, dtype=np.float32).reshape(2, WIDTH), ms.float32)
