"""What has been touched: the state of cells and parameters, and who is told of it.

State belongs to each parameter and each cell, never to a root. That is what makes nesting, shared parameters and
late additions come out right.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from mindspore import Parameter, nn

from lazycell import _deferral
from lazycell import _mindspore as internals

KEY = "_lazycell_state"
_KEPT = "_lazycell_kept"
lock = threading.RLock()
_order = itertools.count()


class CellState:
    """What lazycell knows about one cell.

    Attributes:
        where: The user's line at which the cell was assigned to its parent.
        order: A number that grows with the time of the first use; None before it.
        called: Whether the cell has been invoked.
        completed: Whether an invocation has returned.
        resolved: Whether a compilation that is still under way has come across the cell.
        optional: Whether its author declared that it may stay unused.
        by_library: Whether MindSpore assigned it to its parent, not the user.
        reported: Whether what it leaves unused has been warned of.
        adopted_in: The version of `Structure` in which everything below it was tracked last.
        graph_parameters, graph_states: What the graphs compiled of it hold: parameters, and cells without any.
    """

    def __init__(self, cell: nn.Cell) -> None:
        self.cell = weakref.ref(cell)
        self.where: str | None = None
        self.optional = False
        self.by_library = False
        self.graph_parameters: list[Parameter] = []
        self.graph_states: list[CellState] = []
        self.adopted_in: int | None = None
        self.forget()

    def forget(self) -> None:
        """Return to the state before any use."""
        self.order: int | None = None
        self.called = False
        self.completed = False
        self.resolved = False
        self.reported = False

    def hold(self, parameters: list[Parameter], states: list[CellState]) -> None:
        """Note what a graph of this cell holds: it may run again without telling."""
        known = {*map(id, self.graph_parameters), *map(id, self.graph_states)}
        self.graph_parameters += [parameter for parameter in parameters if id(parameter) not in known]
        self.graph_states += [state for state in states if id(state) not in known]

    def __deepcopy__(self, memo: dict[int, Any]) -> CellState:
        copied = CellState.__new__(CellState)
        memo[id(self)] = copied
        copied.__dict__.update(self.__dict__, graph_parameters=[], graph_states=[])  # a copy compiles its own graphs
        copied.adopted_in = None
        twin = memo.get(id(self.cell()))  # copy.deepcopy() notes a new object before it copies its parts
        copied.cell = self.cell if twin is None else weakref.ref(twin)
        return copied


def state_of(cell: nn.Cell) -> CellState | None:
    """The state of a tracked cell, or None for a cell that lazycell doesn't track."""
    state: CellState | None = cell.__dict__.get(KEY)
    return state


# ---------------------------------------------------------------------------------------------
# Events


class Observer:
    """Someone to tell of first uses and of freezing; held weakly. Each does something about what matters to it."""

    def parameter_touched(self, parameter: Parameter) -> None:
        """A parameter takes part in a forward pass for the first time."""

    def cell_used(self, cell: nn.Cell) -> None:
        """A cell is used for the first time."""

    def touches_forgotten(self, cell: nn.Cell) -> None:
        """The touches below a cell were reset."""

    def parameters_frozen(self, parameters: list[Parameter]) -> None:
        """Parameters were frozen or unfrozen."""


class _Kept(set[Any]):
    """Objects that live as long as a cell; copies of the cell don't share them."""

    def __deepcopy__(self, memo: dict[int, Any]) -> _Kept:
        return _Kept()


def keep(cell: nn.Cell, thing: object) -> None:
    """Let an object live as long as a cell."""
    cell.__dict__.setdefault(_KEPT, _Kept()).add(thing)


def let_go(cell: nn.Cell, thing: object) -> None:
    """Undo `keep`."""
    cell.__dict__.get(_KEPT, _Kept()).discard(thing)


observers: weakref.WeakSet[Observer] = weakref.WeakSet()
completion_listeners: list[Callable[[nn.Cell], None]] = []


class Structure:
    """Counts changes to any tracked cell's children or parameters, for those who cache a view of them."""

    version = 0


class Touches:
    """Counts first touches, for those who cache what is used."""

    count = 0


def touch_order(parameter: Parameter) -> int | None:
    """A number that grows with the time of a parameter's first touch; None before it."""
    return getattr(parameter, "_lazycell_touched", None)


def now() -> int:
    """A number that is greater than those of all touches so far, and smaller than those of all to come."""
    return next(_order)


def is_touched(parameter: Parameter) -> bool:
    """Whether a parameter has taken part in a forward pass."""
    return touch_order(parameter) is not None


def are_touched(parameters: list[Parameter]) -> list[bool]:
    """The same for many; asked at each step."""
    get = object.__getattribute__  # deferred ones have a slower one
    return [get(parameter, "__dict__").get("_lazycell_touched") is not None for parameter in parameters]


def are_used(listed: list[tuple[Parameter, bool]]) -> list[bool]:
    """Which parameters count as used, each given with whether its use can be tracked: where it can't, it counts."""
    touched = are_touched([parameter for parameter, _ in listed])
    return [is_touched or not tracked for is_touched, (_, tracked) in zip(touched, listed)]


def hold(parameter: Parameter) -> None:
    """Note that a compiled graph may hold a parameter's storage: it must not be taken away any more."""
    parameter._lazycell_held = True


def is_held(parameter: Parameter) -> bool:
    """Whether a compiled graph may hold a parameter's storage."""
    return getattr(parameter, "_lazycell_held", False)


def mark_frozen(parameter: Parameter, frozen: bool) -> None:
    """Note that lazycell, not its author, made a parameter require no gradient; or take that back."""
    parameter._lazycell_frozen = frozen


def is_frozen(parameter: Parameter) -> bool:
    """Whether a parameter requires no gradient because it was frozen, not because its author meant so."""
    return getattr(parameter, "_lazycell_frozen", False) and not parameter.requires_grad


def mark_optimized(parameter: Parameter) -> None:
    """Note that an optimizer updates a parameter."""
    parameter._lazycell_optimized = True


def is_optimized(parameter: Parameter) -> bool:
    """Whether `mark_optimized` was called."""
    return getattr(parameter, "_lazycell_optimized", False)


def tell(event: str, subject: Any) -> None:
    """Tell all observers, also when one of them fails; the first failure comes out."""
    errors = []
    for observer in list(observers):
        try:
            getattr(observer, event)(subject)
        except Exception as error:
            errors.append(error)
    if errors:
        raise errors[0]


class _Postponed(threading.local):
    parameters: list[Parameter] | None = None


_postponed = _Postponed()


@contextmanager
def storage_postponed() -> Iterator[None]:
    """What this thread touches inside gets its storage at the end, also after an exception."""
    touched = _postponed.parameters = []
    try:
        with _deferral.no_storage():
            yield
    finally:
        _postponed.parameters = None
        for parameter in touched:
            _deferral.materialize(parameter)


def touch(parameter: Parameter) -> None:
    """Note that a parameter takes part in a forward pass, and give it its storage."""
    with lock:
        if not is_touched(parameter):
            _deferral.require_shape(parameter)
            if _postponed.parameters is None:
                _deferral.materialize(parameter)
            else:
                _postponed.parameters.append(parameter)
            parameter._lazycell_touched = next(_order)
            Touches.count += 1
            tell("parameter_touched", parameter)


def use(state: CellState) -> None:
    with lock:
        if state.order is None:
            state.order = next(_order)
            cell = state.cell()
            if cell is not None:
                tell("cell_used", cell)


def complete(cell: nn.Cell, outermost: bool) -> None:
    """Note that an invocation of a tracked cell has returned; if it was the outermost one, it is reported."""
    state = state_of(cell)
    if state is not None:
        state.completed = True
    if outermost:
        for listener in completion_listeners:
            listener(cell)


# ---------------------------------------------------------------------------------------------
# Trees


def own_parameters(cell: nn.Cell) -> list[Parameter]:
    """The direct parameters of a cell, without reading them."""
    return [parameter for parameter in OrderedDict.values(cell._params) if parameter is not None]


def own_children(cell: nn.Cell) -> list[tuple[str, nn.Cell]]:
    """The direct children of a cell that are layers, by name."""
    children = OrderedDict.items(cell._cells)
    return [(name, child) for name, child in children if child is not None and internals.is_layer(child)]


def subtree(*cells: nn.Cell) -> Iterator[nn.Cell]:
    """Cells and all below them, each once, parents first, in MindSpore's own order."""
    seen: set[int] = set()
    stack = list(reversed(cells))
    while stack:
        current = stack.pop()
        if id(current) not in seen:
            seen.add(id(current))
            yield current
            stack.extend(child for _, child in reversed(own_children(current)))


# A cell's mappings, and the set in which MindSpore notes which parameters of lists it has seen.
_SEEN = ("_params", "_cells", "_exist_objs")
_PLAIN = frozenset((bool, int, float, str, type(None)))  # most of what a cell keeps, told apart at once


def hidden_parameters(cell: nn.Cell) -> list[Parameter]:
    """The parameters that a cell keeps where a read can't be seen: in tuples, lists, dicts, plain attributes."""
    found: dict[int, Parameter] = {}
    stack: list[Any] = [value for key, value in cell.__dict__.items() if key not in _SEEN]
    seen: set[int] = set()
    while stack:
        value = stack.pop()
        if type(value) in _PLAIN:
            continue
        if isinstance(value, Parameter):
            found[id(value)] = value
        elif isinstance(value, Observer):  # a live list, which follows what is used
            continue
        elif isinstance(value, (list, tuple, dict, set)) and id(value) not in seen:
            seen.add(id(value))
            stack.extend(value.values() if isinstance(value, dict) else value)
    return list(found.values())
