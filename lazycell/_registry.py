"""Views on what has been touched: records, live lists, the warning about unused layers."""

from __future__ import annotations

import weakref
from bisect import bisect
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from mindspore import Parameter, nn

from lazycell import _deferral, _tracking
from lazycell import _mindspore as internals
from lazycell._errors import LazyCellError, UntouchedError, UntouchedWarning, UnusedLayerWarning, warn
from lazycell._tracking import CellState, Structure, is_touched, own_children, own_parameters, state_of

# ---------------------------------------------------------------------------------------------
# Layers


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
        state: ``TOUCHED`` once it or anything below it was used; before that ``MATERIALIZED`` if all
            of its own parameters have storage, else ``DEFERRED``.
        num_parameters: Elements of its own parameters; one that is shared counts where it comes first.
        nbytes: Bytes of its own parameters.
        trainable: Whether one of its own parameters requires a gradient.
        order: Position in the order of first use, from 0; None for an unused layer.
        where: ``"file.py:12"``, the line at which it was assigned; None if that wasn't seen.
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


@dataclass
class _Node:
    """One cell of a tree as it stands now; shared cells and parameters belong to where they come first."""

    name: str
    cell: nn.Cell
    state: CellState | None
    parameters: list[Parameter]
    children: list[_Node] = field(default_factory=list)
    order: float | None = None  # of the first use of the cell or of anything below it

    @property
    def optional(self) -> bool:
        return self.state is not None and self.state.optional


def _own_order(node: _Node) -> float | None:
    if node.state is None:  # not tracked: it counts as used, at an unknown time
        return float("inf")
    if node.state.order is None and any(map(is_touched, node.parameters)):
        return float("inf")  # one of its parameters was used through another cell
    return node.state.order


def _tree(cell: nn.Cell) -> list[_Node]:
    """The nodes of a cell and of all below it, parents first, in MindSpore's own order."""
    nodes: dict[int, _Node] = {}
    edges: list[tuple[_Node, int]] = []
    seen: set[int] = set()
    stack: list[tuple[str, nn.Cell, _Node | None]] = [("", cell, None)]
    while stack:
        name, current, parent = stack.pop()
        if parent is not None:
            edges.append((parent, id(current)))
        if id(current) in nodes:
            continue
        fresh = {id(p): p for p in own_parameters(current) if id(p) not in seen}
        seen.update(fresh)
        node = nodes[id(current)] = _Node(name, current, state_of(current), list(fresh.values()))
        prefix = name + "." if name else ""
        stack.extend((prefix + key, child, node) for key, child in reversed(own_children(current)))
    for parent, child in edges:
        parent.children.append(nodes[child])
    _spread_use(list(nodes.values()))
    return list(nodes.values())


def _spread_use(nodes: list[_Node]) -> None:
    """Let every cell count as used from the first use of anything below it."""
    finished: set[int] = set()
    for root in nodes:
        stack = [root]
        while stack:
            node = stack[-1]
            waiting = [c for c in node.children if id(c) not in finished and id(c) not in map(id, stack)]
            if id(node) not in finished and waiting:
                stack.extend(waiting)
                continue
            stack.pop()
            if id(node) not in finished:
                finished.add(id(node))
                orders = [_own_order(node), *(child.order for child in node.children)]
                node.order = min((order for order in orders if order is not None), default=None)


def _layer_state(node: _Node) -> LayerState:
    if node.order is not None:
        return LayerState.TOUCHED
    own = own_parameters(node.cell)
    allocated = bool(own) and not any(map(_deferral.is_deferred, own))
    return LayerState.MATERIALIZED if allocated else LayerState.DEFERRED


def _record(node: _Node, order: int | None = None) -> LayerRecord:
    return LayerRecord(
        name=node.name,
        cls_name=type(node.cell).__name__,
        state=_layer_state(node),
        num_parameters=sum(p.size for p in node.parameters),
        nbytes=sum(p.nbytes for p in node.parameters),
        trainable=any(p.requires_grad for p in node.parameters),
        order=order,
        where=node.state.where if node.state is not None else None,
    )


def _records(nodes: list[_Node]) -> tuple[LayerRecord, ...]:
    used = sorted((node.order, index) for index, node in enumerate(nodes) if node.order is not None)
    ranks = {index: rank for rank, (_, index) in enumerate(used)}
    return tuple(_record(node, ranks.get(index)) for index, node in enumerate(nodes))


def require_cell(cell: object) -> nn.Cell:
    """Refuse anything that isn't a cell.

    Raises:
        TypeError: It isn't.
    """
    if not isinstance(cell, nn.Cell):
        raise TypeError(f"expected a mindspore.nn.Cell, but got {type(cell).__name__}.")
    return cell


def require_tracked(cell: object) -> nn.Cell:
    """Refuse a cell with nothing tracked in it; start to track what was added since.

    Raises:
        TypeError: It isn't a cell.
        LazyCellError: Neither the cell nor anything below it is tracked.
    """
    cell = require_cell(cell)
    tracked = [current for current in list(_tracking.subtree(cell)) if state_of(current) is not None]
    if not tracked:
        name = type(cell).__name__
        raise LazyCellError(
            f"{name} isn't tracked, so what it uses isn't known. Let it inherit from lazycell.LazyCell "
            f"instead of nn.Cell, or call lazycell.track(net) first."
        )
    if state_of(cell) is not None:
        _tracking.adopt(cell)
    return cell


# ---------------------------------------------------------------------------------------------
# The registry


class _TouchHandle:
    """Undoes one ``on_touch``; `remove` may be called twice."""

    def __init__(self, cell: nn.Cell, callback: Callable[[LayerRecord], None]) -> None:
        self._cell = weakref.ref(cell)
        self._callback = callback
        self._told = {node.name for node in _tree(cell) if node.order is not None}
        self._version = -1
        self._names: dict[int, tuple[str, ...]] = {}
        _tracking.observers.add(self)
        _handles.add(self)

    def remove(self) -> None:
        """Call back no more."""
        _tracking.observers.discard(self)
        _handles.discard(self)

    def parameter_touched(self, parameter: Parameter) -> None:
        """Part of the observer's interface; the cell's own use is told as well."""

    def cell_used(self, cell: nn.Cell) -> None:
        """Tell of a layer, and of the containers above it, at their first use."""
        root = self._cell()
        if root is None:
            self.remove()
            return
        if self._version != Structure.version:
            self._names = _lineages(root)
            self._version = Structure.version
        fresh = [name for name in self._names.get(id(cell), ()) if name not in self._told]
        if fresh:
            self._told.update(fresh)
            for record in LayerRegistry(root).layers:
                if record.name in fresh:
                    self._callback(record)


_handles: set[_TouchHandle] = set()  # observers are held weakly; a callback lives until it is removed


def _lineages(root: nn.Cell) -> dict[int, tuple[str, ...]]:
    """For each cell below a root, the names of itself and of all cells between it and the root."""
    lineages: dict[int, set[str]] = {}
    for node in _tree(root):
        lineages.setdefault(id(node.cell), {node.name} - {""})
        for child in node.children:
            lineages.setdefault(id(child.cell), {child.name}).update(lineages[id(node.cell)])
    return {key: tuple(names) for key, names in lineages.items()}


class LayerRegistry:
    """A live view on what is deferred, materialized and touched below a cell.

    Every property is computed from the cell as it stands at that moment; nothing is allocated by asking.

    Example:
        >>> import lazycell, mindspore as ms
        >>> from mindspore import nn
        >>> class Net(lazycell.LazyCell):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.used = nn.Dense(3, 2)
        ...         self.dead = nn.Dense(3, 2)
        ...     def construct(self, x):
        ...         return self.used(x)
        >>> net = Net()
        >>> lazycell.optional(net.dead) is net.dead
        True
        >>> y = net(ms.ops.ones((1, 3)))
        >>> registry = lazycell.registry(net)
        >>> registry.touched, registry.untouched
        (('used',), ('dead',))
        >>> registry.nbytes, registry.allocated_nbytes, registry.deferred_nbytes
        (64, 32, 32)
    """

    __module__ = "lazycell"

    def __init__(self, cell: nn.Cell) -> None:
        self._cell = cell

    @property
    def layers(self) -> tuple[LayerRecord, ...]:
        """One record for each layer, in the order of definition; the cell itself is not among them."""
        return _records(_tree(self._cell)[1:])

    @property
    def touched(self) -> tuple[str, ...]:
        """The names of used layers."""
        return tuple(record.name for record in self.layers if record.state is LayerState.TOUCHED)

    @property
    def untouched(self) -> tuple[str, ...]:
        """The names of unused layers."""
        return tuple(record.name for record in self.layers if record.state is not LayerState.TOUCHED)

    def _sum(self, size: Callable[[Parameter], int], counts: Callable[[Parameter], bool]) -> int:
        parameters = [p for node in _tree(self._cell) for p in node.parameters]
        return sum(size(p) for p in parameters if counts(p))

    @property
    def num_parameters(self) -> int:
        """Elements of all parameters."""
        return self._sum(lambda p: int(p.size), lambda p: True)

    @property
    def touched_parameters(self) -> int:
        """Elements of the touched parameters."""
        return self._sum(lambda p: int(p.size), is_touched)

    @property
    def untouched_parameters(self) -> int:
        """Elements of the untouched parameters."""
        return self.num_parameters - self.touched_parameters

    @property
    def nbytes(self) -> int:
        """Bytes of all parameters."""
        return self._sum(lambda p: int(p.nbytes), lambda p: True)

    @property
    def deferred_nbytes(self) -> int:
        """Bytes that aren't allocated."""
        return self._sum(lambda p: int(p.nbytes), _deferral.is_deferred)

    @property
    def allocated_nbytes(self) -> int:
        """Bytes of the parameters that have storage."""
        return self.nbytes - self.deferred_nbytes

    def on_touch(self, callback: Callable[[LayerRecord], None]) -> _TouchHandle:
        """Have a function called once for each layer, at its first use from now on.

        Args:
            callback: Called in the middle of the forward pass with the layer's `LayerRecord`.

        Returns:
            A handle; its ``remove()`` ends the calls.
        """
        return _TouchHandle(self._cell, callback)

    def reset(self) -> None:
        """Forget all touches below the cell; storage and values stay, and the next forward pass reports anew."""
        _tracking.reset(self._cell)
        _refresh_live_lists()

    def __repr__(self) -> str:
        layers = self.layers
        used = sum(record.state is LayerState.TOUCHED for record in layers)
        return f"<LayerRegistry of {type(self._cell).__name__}: {used} of {len(layers)} layers used>"

    def __str__(self) -> str:
        return _table(self)


def registry(cell: nn.Cell) -> LayerRegistry:
    """What is deferred, materialized and touched below a cell.

    Args:
        cell: A `LazyCell`, or any cell that holds tracked ones.

    Raises:
        TypeError: ``cell`` is no cell.
        LazyCellError: Nothing below it is tracked.
    """
    return LayerRegistry(require_tracked(cell))


# ---------------------------------------------------------------------------------------------
# Text


def format_bytes(nbytes: int) -> str:
    """A number of bytes with three significant digits, as ``"36 B"`` or ``"1.5 GB"`` (powers of 1024)."""
    if nbytes < 1024:
        return f"{nbytes} B"
    size, units = float(nbytes), iter(("KB", "MB", "GB", "TB", "PB"))
    unit = "B"
    while size >= 1000 and (larger := next(units, None)) is not None:
        size, unit = size / 1024, larger
    return f"{size:.3g} {unit}"


def _shorten(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width // 2 - 1] + ".." + text[-(width - width // 2 - 1) :]


def _table(view: LayerRegistry) -> str:
    """The registry as text of at most 80 columns."""
    layers = view.layers
    rows = [("layer", "class", "state", "parameters", "bytes")]
    for record in layers:
        counts = (f"{record.num_parameters:,}", format_bytes(record.nbytes)) if record.num_parameters else ("-", "-")
        rows.append((_shorten(record.name, 28), _shorten(record.cls_name, 16), record.state.value, *counts))
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    lines = []
    for name, cls_name, state, *counts in rows:
        left = f"{name:<{widths[0]}}  {cls_name:<{widths[1]}}  {state:<{widths[2]}}"
        lines.append(f"{left}  {counts[0]:>{widths[3]}}  {counts[1]:>{widths[4]}}")
    lines.insert(1, "-" * len(lines[0]))
    used = sum(record.state is LayerState.TOUCHED for record in layers)
    lines.append(lines[1])
    lines.append(
        f"{used} of {len(layers)} layers used; {view.touched_parameters:,} of {view.num_parameters:,} parameters touched"
    )
    lines.append(f"{format_bytes(view.allocated_nbytes)} allocated, {format_bytes(view.deferred_nbytes)} deferred")
    return "\n".join(lines)


# ---------------------------------------------------------------------------------------------
# The warning


def _topmost_unused(root: _Node) -> list[_Node]:
    found: list[_Node] = []
    seen: set[int] = set()
    stack = [root]
    while stack:
        node = stack.pop()
        if id(node) in seen or node.optional:
            continue
        seen.add(id(node))
        if node.order is None:
            found.append(node)
        else:
            stack.extend(reversed(node.children))
    return found


def _below(nodes: list[_Node]) -> list[_Node]:
    seen: dict[int, _Node] = {}
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if id(node) not in seen:
            seen[id(node)] = node
            stack.extend(node.children)
    return list(seen.values())


def _total(node: _Node) -> LayerRecord:
    """The record of an unused layer with the totals of all below it."""
    parameters = [p for below in _below([node]) for p in below.parameters]
    record = replace(
        _record(node),
        num_parameters=sum(p.size for p in parameters),
        nbytes=sum(p.nbytes for p in parameters),
        trainable=any(p.requires_grad for p in parameters),
    )
    return record


def _describe(record: LayerRecord) -> str:
    size = f"{record.num_parameters:,} parameters, {format_bytes(record.nbytes)}"
    where = f", assigned at {record.where}" if record.where else ""
    return f"  {record.name} ({record.cls_name}): {size if record.num_parameters else 'no parameters'}{where}"


def warn_of_unused(cell: nn.Cell) -> None:
    """After the first completed forward pass of a cell, name the layers below it that it didn't use."""
    unused = _topmost_unused(_tree(cell)[0])
    if not unused:
        return
    layers = tuple(map(_total, unused))
    nbytes = sum(p.nbytes for node in _below(unused) for p in node.parameters)
    many = len(layers) != 1
    message = "\n".join(
        (
            f"{len(layers)} {'layers' if many else 'layer'} of {type(cell).__name__} "
            f"{'were' if many else 'was'} defined and never invoked ({format_bytes(nbytes)}):",
            *map(_describe, layers),
            f"Remove {'them' if many else 'it'}, or declare {'each' if many else 'it'} with lazycell.optional(layer).",
        )
    )
    warn(UnusedLayerWarning(message, layers, nbytes))


_tracking.completion_listeners.append(warn_of_unused)


# ---------------------------------------------------------------------------------------------
# Live lists

_UNTOUCHED = """\
the touched parameters of {name} were listed before any forward pass of it had completed, so the list is empty \
or incomplete. Do one of these first:
  - call the net once, or lazycell.dry_run(net, inputs), before you build the optimizer
  - build the optimizer with lazycell.LazyOptimizer, which waits for the first step
  - call lazycell.patch(), which makes MindSpore's own optimizers wait"""


class TouchedParameters(list[Parameter]):
    """The touched parameters of a cell that require a gradient: a live list.

    It is empty before the first forward pass, and filled in place when parameters are touched, in the order in
    which plain ``nn.Cell.trainable_params()`` gives them. Slices and copies are ordinary lists.
    """

    __module__ = "lazycell"
    __hash__ = object.__hash__  # type: ignore[assignment]  # to be held weakly; lists aren't hashable otherwise

    def __init__(self, cell: nn.Cell, recurse: bool = True) -> None:
        super().__init__()
        self._cell = weakref.ref(cell)
        self._recurse = recurse
        self._refresh()
        _tracking.observers.add(self)

    def _refresh(self) -> None:
        """List anew; what was counted on until now may have changed in any way."""
        cell = self._cell()
        if cell is None:
            return
        with _tracking._lock:
            self._version = Structure.version
            self._known = list(_parameters(cell, self._recurse))  # held, so that no id can come to mean another one
            self._rank = {id(parameter): rank for rank, (parameter, _) in enumerate(self._known)}
            counted = [p for p, tracked in self._known if p.requires_grad and (is_touched(p) or not tracked)]
            self._ranks = [self._rank[id(parameter)] for parameter in counted]
            self[:] = counted

    def parameter_touched(self, parameter: Parameter) -> None:
        """Take a parameter in at its place; called at its first touch."""
        if self._version != Structure.version:
            self._refresh()
            return
        rank = self._rank.get(id(parameter))
        if rank is not None and parameter.requires_grad:
            place = bisect(self._ranks, rank)
            if not place or self._ranks[place - 1] != rank:
                self._ranks.insert(place, rank)
                self.insert(place, parameter)

    def cell_used(self, cell: nn.Cell) -> None:
        """Part of the observer's interface; only parameters matter here."""

    def __iter__(self) -> Iterator[Parameter]:
        cell = self._cell()
        if cell is not None:
            if not _has_completed(cell):
                self._complain(type(cell).__name__)
            self._refresh()
        return iter(self[:])

    def _complain(self, name: str) -> None:
        if internals.in_graph_mode():
            raise UntouchedError(_UNTOUCHED.format(name=name))
        warn(UntouchedWarning(_UNTOUCHED.format(name=name)))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return list, (self[:],)


def _parameters(cell: nn.Cell, recurse: bool) -> Iterator[tuple[Parameter, bool]]:
    """MindSpore's own listing of parameters, each with whether its use can be tracked."""
    seen: set[int] = set()
    for current in _tracking.subtree(cell) if recurse else (cell,):
        tracked = state_of(current) is not None
        for parameter in own_parameters(current):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield parameter, tracked


def _has_completed(cell: nn.Cell) -> bool:
    state = state_of(cell)
    if state is not None and state.called:
        return state.completed
    return any(below is None or below.completed for below in map(state_of, _tracking.subtree(cell)))


def _refresh_live_lists() -> None:
    for observer in list(_tracking.observers):
        if isinstance(observer, TouchedParameters):
            observer._refresh()


def trainable_params(cell: nn.Cell, recurse: bool = True) -> TouchedParameters:
    """The touched parameters of a cell that require a gradient, as a live list.

    Args:
        cell: A `LazyCell`, or any cell that holds tracked ones. Parameters of cells that aren't tracked count as
            touched.
        recurse: Whether to include the parameters of all cells below it.

    Returns:
        A `TouchedParameters`: a new list object with each call.

    Raises:
        TypeError: ``cell`` is no cell.
        LazyCellError: Nothing in it is tracked.

    Example:
        >>> import lazycell, mindspore as ms
        >>> from mindspore import nn
        >>> net = lazycell.track(nn.SequentialCell(nn.Dense(3, 2), nn.ReLU()))
        >>> params = lazycell.trainable_params(net)
        >>> len(params)
        0
        >>> y = net(ms.ops.ones((1, 3)))
        >>> [p.name for p in params]
        ['0.weight', '0.bias']
    """
    return TouchedParameters(require_tracked(cell), recurse)
