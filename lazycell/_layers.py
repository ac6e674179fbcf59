"""The tree of layers below a cell, as it stands at one moment, and the records made of it."""

from __future__ import annotations

import weakref
from collections import deque
from dataclasses import dataclass, field
from enum import Enum

from mindspore import Parameter, nn

from lazycell import _deferral
from lazycell._listed import is_listed
from lazycell._touching import CellState, own_children, own_parameters, state_of, touch_order
from lazycell._unsized import is_unsized, num_bytes, num_elements

_UNKNOWN = float("inf")  # used, but nobody knows when


class LayerState(Enum):
    """How far a layer has come: ``DEFERRED``, ``MATERIALIZED`` or ``TOUCHED``."""

    __module__ = "lazycell"

    DEFERRED = "deferred"
    MATERIALIZED = "materialized"
    TOUCHED = "touched"


@dataclass(frozen=True)
class LayerRecord:
    """What is known about one layer.

    Attributes:
        name: Dotted path from the cell that the registry was asked for.
        cls_name: The layer's class.
        state: ``TOUCHED`` once it, one of its parameters or anything below it was used; before that
            ``MATERIALIZED`` if all of its own parameters have storage, else ``DEFERRED``.
        num_parameters: Elements of its own parameters; one that is shared counts where it comes first.
        nbytes: Bytes of its own parameters.
        trainable: Whether one of its own parameters requires a gradient.
        order: Position in the order of first use, from 0; None for an unused layer.
        where: ``"file.py:12"``, the line at which it was assigned; None if that wasn't seen.
        sized: Whether the shapes of its own parameters are known. Those that wait for a first input count 0.
    """

    __module__ = "lazycell"

    name: str
    cls_name: str
    state: LayerState
    num_parameters: int
    nbytes: int
    trainable: bool
    order: int | None
    where: str | None
    sized: bool = True


@dataclass(eq=False)
class Node:
    """One cell of a tree; shared cells and parameters belong to where they come first.

    Attributes:
        parameters: The cell's own parameters, without those that came earlier in the tree.
        order: A number that grows with the time of the first use of the cell or of anything below it; None before.
    """

    name: str
    cell: nn.Cell
    state: CellState | None
    parameters: list[Parameter]
    children: list[Node] = field(default_factory=list)
    order: float | None = None
    # Weak: nodes in a cycle would keep cells alive, and bring back those that are going.
    _parents: list[weakref.ref[Node]] = field(default_factory=list)

    @property
    def parents(self) -> list[Node]:
        """The nodes that hold this one, as long as the root is held by someone."""
        return [parent for parent in (known() for known in self._parents) if parent is not None]

    def add(self, child: Node) -> None:
        """Hold another node."""
        self.children.append(child)
        child._parents.append(weakref.ref(self))

    @property
    def optional(self) -> bool:
        """Whether it may stay unused: declared so, or a container of nothing but such cells."""
        if self.state is not None and self.state.optional:
            return True
        return bool(self.children) and not own_parameters(self.cell) and all(c.optional for c in self.children)


def tree(cell: nn.Cell) -> list[Node]:
    """The nodes of a cell and of all below it, parents first, in MindSpore's own order."""
    nodes: dict[int, Node] = {}
    seen: set[int] = set()
    stack: list[tuple[str, nn.Cell, Node | None]] = [("", cell, None)]
    while stack:
        name, current, parent = stack.pop()
        node = nodes.get(id(current))
        if node is None:
            fresh = {id(p): p for p in own_parameters(current) if id(p) not in seen}
            seen.update(fresh)
            node = nodes[id(current)] = Node(name, current, state_of(current), list(fresh.values()))
            prefix = name + "." if name else ""
            stack.extend((prefix + key, child, node) for key, child in reversed(own_children(current)))
        if parent is not None:
            parent.add(node)
    spread_use(list(nodes.values()))
    return list(nodes.values())


def own_order(node: Node) -> float | None:
    """When a cell was first used, by a call or by a read of one of its parameters; None if it wasn't."""
    if node.state is None:  # not tracked: it counts as used
        return _UNKNOWN
    parameters = own_parameters(node.cell)
    if not node.state.called:  # a graph that was given all that a script has listed holds it, used or not
        parameters = [parameter for parameter in parameters if not is_listed(parameter)]
    orders = [node.state.order, *map(touch_order, parameters)]
    return min((order for order in orders if order is not None), default=None)


def spread_use(nodes: list[Node]) -> None:
    """Let every cell count as used from the first use of anything below it."""
    used = [(order, node) for node in nodes if (order := own_order(node)) is not None]
    for order, node in sorted(used, key=lambda pair: pair[0]):
        waiting = deque([node])
        while waiting:
            current = waiting.popleft()
            if current.order is None:
                current.order = order
                waiting.extend(current.parents)


def layer_state(node: Node) -> LayerState:
    """How far a layer has come."""
    if node.order is not None:
        return LayerState.TOUCHED
    own = own_parameters(node.cell)
    allocated = bool(own) and not any(map(_deferral.is_deferred, own))
    return LayerState.MATERIALIZED if allocated else LayerState.DEFERRED


def record(node: Node, order: int | None = None, parameters: list[Parameter] | None = None) -> LayerRecord:
    """The record of a node, with the sums of its own parameters or of those given."""
    counted = node.parameters if parameters is None else parameters
    return LayerRecord(
        name=node.name,
        cls_name=type(node.cell).__name__,
        state=layer_state(node),
        num_parameters=sum(map(num_elements, counted)),
        nbytes=sum(map(num_bytes, counted)),
        trainable=any(p.requires_grad for p in counted),
        order=order,
        where=node.state.where if node.state is not None else None,
        sized=not any(map(is_unsized, counted)),
    )


def records(nodes: list[Node]) -> tuple[LayerRecord, ...]:
    """The records of nodes, with their positions in the order of first use."""
    used = sorted((node.order, index) for index, node in enumerate(nodes) if node.order is not None)
    ranks = {index: rank for rank, (_, index) in enumerate(used)}
    return tuple(record(node, ranks.get(index)) for index, node in enumerate(nodes))
