"""The registry, callbacks on first use, and the warning about unused layers."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace

from mindspore import Parameter, nn

from lazycell import _deferral
from lazycell import _mindspore as internals
from lazycell import _touching, _tracking
from lazycell._errors import LazyCellError, UnusedLayerWarning, warn
from lazycell._layers import LayerRecord, Node, record, records, tree
from lazycell._touching import Structure, is_touched, own_parameters, state_of
from lazycell._unsized import num_bytes, num_elements


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
    if state_of(cell) is not None:
        _tracking.adopt(cell)
    elif not any(map(state_of, _touching.subtree(cell))):
        name = type(cell).__name__
        raise LazyCellError(
            f"{name} isn't tracked, so what it uses isn't known. Let it inherit from lazycell.LazyCell "
            f"instead of nn.Cell, or call lazycell.track(net) first."
        )
    return cell


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
        return records(tree(self._cell)[1:])

    @property
    def touched(self) -> tuple[str, ...]:
        """The names of used layers."""
        return tuple(node.name for node in tree(self._cell)[1:] if node.order is not None)

    @property
    def untouched(self) -> tuple[str, ...]:
        """The names of unused layers."""
        return tuple(node.name for node in tree(self._cell)[1:] if node.order is None)

    def _parameters(self) -> list[Parameter]:
        return [parameter for node in tree(self._cell) for parameter in node.parameters]

    @property
    def num_parameters(self) -> int:
        """Elements of all parameters."""
        return sum(map(num_elements, self._parameters()))

    @property
    def touched_parameters(self) -> int:
        """Elements of the touched parameters."""
        return sum(num_elements(p) for p in self._parameters() if is_touched(p))

    @property
    def untouched_parameters(self) -> int:
        """Elements of the untouched parameters."""
        return sum(num_elements(p) for p in self._parameters() if not is_touched(p))

    @property
    def nbytes(self) -> int:
        """Bytes of all parameters."""
        return sum(map(num_bytes, self._parameters()))

    @property
    def deferred_nbytes(self) -> int:
        """Bytes that aren't allocated."""
        return sum(num_bytes(p) for p in self._parameters() if _deferral.is_deferred(p))

    @property
    def allocated_nbytes(self) -> int:
        """Bytes of the parameters that have storage."""
        return sum(num_bytes(p) for p in self._parameters() if not _deferral.is_deferred(p))

    def on_touch(self, callback: Callable[[LayerRecord], None]) -> TouchHandle:
        """Have a function called once for each layer, at its first use from now on.

        Args:
            callback: Called in the middle of the forward pass with the layer's `LayerRecord`. An exception
                in it comes out of the forward pass.

        Returns:
            A handle; its ``remove()`` ends the calls. They end with the cell's life as well.
        """
        return TouchHandle(self._cell, callback)

    def reset(self) -> None:
        """Forget all touches below the cell; storage and values stay, and the next forward pass reports anew."""
        _tracking.reset(self._cell)

    def __repr__(self) -> str:
        nodes = tree(self._cell)[1:]
        used = sum(node.order is not None for node in nodes)
        return f"<LayerRegistry of {type(self._cell).__name__}: {used} of {len(nodes)} layers used>"

    def __str__(self) -> str:
        return _table(tree(self._cell))


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
# Callbacks


class TouchHandle(_touching.Observer):
    """One ``on_touch``: tells of first uses below a cell until it is removed; `remove` may be called twice."""

    def __init__(self, cell: nn.Cell, callback: Callable[[LayerRecord], None]) -> None:
        self._cell = weakref.ref(cell)
        self._callback = callback
        self._told: set[int] = set()
        self.touches_forgotten(cell)
        _touching.keep(cell, self)  # observers are held weakly; this one lives as long as the cell
        _touching.observers.add(self)

    def remove(self) -> None:
        """Call back no more."""
        _touching.observers.discard(self)
        cell = self._cell()
        if cell is not None:
            _touching.let_go(cell, self)

    def _look(self, cell: nn.Cell) -> list[Node]:
        """Look at the tree as it stands now, and note who owns what."""
        self._version = Structure.version
        nodes = tree(cell)
        self._root = nodes[0]
        self._nodes = {id(node.cell): node for node in nodes}
        self._owners: dict[int, list[Node]] = {}
        for node in nodes:
            for parameter in own_parameters(node.cell):
                self._owners.setdefault(id(parameter), []).append(node)
        return nodes

    def _up_to_date(self) -> bool:
        cell = self._cell()
        if cell is not None and self._version != Structure.version:
            self._look(cell)
        return cell is not None

    def parameter_touched(self, parameter: Parameter) -> None:
        """Tell of the layers that own a parameter, whoever used it."""
        if self._up_to_date():
            self._tell(self._owners.get(id(parameter), []))

    def cell_used(self, cell: nn.Cell) -> None:
        """Tell of a layer."""
        if self._up_to_date() and id(cell) in self._nodes:
            self._tell([self._nodes[id(cell)]])

    def touches_forgotten(self, cell: nn.Cell) -> None:
        """Tell anew of what isn't used any more."""
        root = self._cell()
        if root is not None:
            self._told = {id(node.cell) for node in self._look(root) if node.order is not None}
            self._position = len(self._told - {id(root)})

    def _tell(self, used: list[Node]) -> None:
        """Call back for layers and for the containers above them, outermost first."""
        fresh: list[Node] = []
        waiting = list(used)
        while waiting:
            node = waiting.pop()
            if id(node.cell) not in self._told:
                self._told.add(id(node.cell))
                fresh.append(node)
                waiting.extend(node.parents)
        for node in reversed(fresh):
            node.order = 0.0
            if node is not self._root:
                self._position += 1
                self._callback(record(node, self._position - 1))


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


def sizes_in_words(num_parameters: int, nbytes: int, sized: bool = True) -> tuple[str, str]:
    """Columns with numbers of parameters and of bytes; of some nobody may know them yet."""
    if sized:
        return (f"{num_parameters:,}", format_bytes(nbytes)) if num_parameters else ("-", "-")
    return (f"{num_parameters:,} + ?", f"{format_bytes(nbytes)} + ?") if num_parameters else ("?", "?")


def shorten(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width // 2 - 1] + ".." + text[-(width - width // 2 - 1) :]


_WIDTH = 80


def _table(nodes: list[Node]) -> str:
    """A tree as text of at most 80 columns; the root has a row if it has parameters of its own."""
    layers = records(nodes[1:])
    root = [replace(record(nodes[0]), name="(itself)")] if nodes[0].parameters else []
    rows = [("layer", "class", "state", "parameters", "bytes"), *map(_row, [*root, *layers])]
    for column, least in ((1, 16), (0, 0)):  # long classes are shortened first, then long names
        spare = _WIDTH - sum(2 + max(map(len, texts)) for texts in zip(*rows)) + 2
        width = max(len(row[column]) for row in rows)
        rows = [(*row[:column], shorten(row[column], max(width + spare, least)), *row[column + 1 :]) for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows)]
    aligned = [
        "  ".join(text.ljust(width) if column < 3 else text.rjust(width) for column, (text, width) in enumerate(cells))
        for cells in (zip(row, widths) for row in rows)
    ]
    rule = "-" * len(aligned[0])
    return "\n".join([aligned[0], rule, *aligned[1:], rule, *_summary(nodes)])


def _row(layer: LayerRecord) -> tuple[str, ...]:
    size, nbytes = sizes_in_words(layer.num_parameters, layer.nbytes, layer.sized)
    return layer.name, layer.cls_name, layer.state.value, size, nbytes


def _summary(nodes: list[Node]) -> list[str]:
    parameters = [parameter for node in nodes for parameter in node.parameters]
    used = sum(node.order is not None for node in nodes[1:])
    touched = sum(num_elements(p) for p in parameters if is_touched(p))
    deferred = sum(num_bytes(p) for p in parameters if _deferral.is_deferred(p))
    total = sum(num_bytes(p) for p in parameters)
    sizes = f"{touched:,} of {sum(num_elements(p) for p in parameters):,} parameters touched"
    return [
        f"{used} of {len(nodes) - 1} layers used; {sizes}",
        f"{format_bytes(total - deferred)} allocated, {format_bytes(deferred)} deferred",
    ]


# ---------------------------------------------------------------------------------------------
# The warning


def topmost_unused(root: Node) -> list[Node]:
    """The unused nodes that the user could remove, each standing for all below it."""
    found: list[Node] = []
    seen: set[int] = set()
    stack = [root]
    while stack:
        node = stack.pop()
        if id(node) in seen or node.optional or (node.order is None and _is_librarys(node)):
            continue
        seen.add(id(node))
        if node.order is None:
            found.append(node)
            continue
        # What a layer of MindSpore's own leaves unused inside is not the user's matter.
        inside = internals.is_library_layer(node.cell)
        stack.extend(child for child in reversed(node.children) if child.order is not None or not inside)
    return found


def _is_librarys(node: Node) -> bool:
    """Whether MindSpore put a cell where it is, not the user."""
    return node.state is not None and node.state.by_library


def unused_below(nodes: list[Node]) -> list[Node]:
    """Unused nodes, and the unused ones below them that aren't optional."""
    seen: dict[int, Node] = {}
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if id(node) not in seen and node.order is None and not node.optional:
            seen[id(node)] = node
            stack.extend(node.children)
    return list(seen.values())


def _parameters_of(nodes: list[Node]) -> list[Parameter]:
    return [parameter for node in nodes for parameter in node.parameters]


def _describe(layer: LayerRecord) -> str:
    number, nbytes = sizes_in_words(layer.num_parameters, layer.nbytes, layer.sized)
    size = f"{number} parameters, {nbytes}" if layer.num_parameters or not layer.sized else "no parameters"
    if number == nbytes == "?":
        size = "parameters whose shape isn't known yet"
    where = f", assigned at {layer.where}" if layer.where else ""
    return f"  {layer.name} ({layer.cls_name}): {size}{where}"


def warn_of_unused(cell: nn.Cell) -> None:
    """After the first completed forward pass of a cell, name the layers below it that it didn't use.

    Below a wrapper of MindSpore's own, as ``TrainOneStepCell``, the user's nets are warned of, each once.
    """
    root = tree(cell)[0]
    root.order = 0 if root.order is None else root.order  # it has just run
    for node in users_own(root):
        if node.state is not None and not node.state.reported:
            node.state.reported = True
            _warn_of(root if node is root else tree(node.cell)[0])


def users_own(root: Node) -> list[Node]:
    """A net, or, if MindSpore's own cells stand around nets of the user, these as far as they are used."""
    found: list[Node] = []
    waiting = [root]
    while waiting:
        node = waiting.pop()
        if node is not root and node.order is None:
            continue
        if internals.is_library_layer(node.cell):
            waiting.extend(reversed(node.children))
        else:
            found.append(node)
    return found


def _warn_of(root: Node) -> None:
    unused = topmost_unused(root)
    if not unused:
        return
    layers = tuple(record(node, parameters=_parameters_of(unused_below([node]))) for node in unused)
    nbytes = sum(num_bytes(p) for p in _parameters_of(unused_below(unused)))
    was, it, each = ("layers", "were"), "them", "each"
    if len(layers) == 1:
        was, it, each = ("layer", "was"), "it", "it"
    message = "\n".join(
        (
            f"{len(layers)} {was[0]} of {type(root.cell).__name__} {was[1]} defined and never invoked "
            f"({format_bytes(nbytes)}):",
            *map(_describe, layers),
            f"Remove {it}, or declare {each} with lazycell.optional(layer).",
        )
    )
    warn(UnusedLayerWarning(message, layers, nbytes))


_touching.completion_listeners.append(warn_of_unused)
