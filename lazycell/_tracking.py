"""What is being run: which parameters and layers have been touched, and how that is noticed.

A tracked cell carries a `CellState`. Until it has been invoked its class is a *watched* subclass, whose
first call notes the use, puts the real class back, and goes on as MindSpore does: a settled cell
costs nothing. Reads of parameters are seen by the mapping in ``cell._params``, which is of a
watching kind as long as one of its parameters is untouched.
"""

from __future__ import annotations

import copy
import functools
import itertools
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType, MethodType
from typing import Any, Protocol

from mindspore import Parameter, nn

from lazycell import _deferral
from lazycell import _mindspore as internals
from lazycell._errors import LazyCellWarning, user_location, warn

_KEY = "_lazycell_state"
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
    """

    def __init__(self, cell: nn.Cell) -> None:
        self.cell = weakref.ref(cell)
        self.where: str | None = None
        self.optional = False
        self.forget()

    def forget(self) -> None:
        """Return to the state before any use."""
        self.order: int | None = None
        self.called = False
        self.completed = False
        self.resolved = False

    def __deepcopy__(self, memo: dict[int, Any]) -> CellState:
        copied = CellState.__new__(CellState)
        memo[id(self)] = copied
        copied.__dict__.update(self.__dict__)
        twin = memo.get(id(self.cell()))  # copy.deepcopy() notes a new object before it copies its parts
        copied.cell = self.cell if twin is None else weakref.ref(twin)
        return copied


def state_of(cell: nn.Cell) -> CellState | None:
    """The state of a tracked cell, or None for a cell that lazycell doesn't track."""
    state: CellState | None = cell.__dict__.get(_KEY)
    return state


# ---------------------------------------------------------------------------------------------
# Events


class Observer(Protocol):
    """Someone to tell of first uses; held weakly."""

    def parameter_touched(self, parameter: Parameter) -> None: ...

    def cell_used(self, cell: nn.Cell) -> None: ...

    def touches_forgotten(self, cell: nn.Cell) -> None: ...


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


def touch_order(parameter: Parameter) -> int | None:
    """A number that grows with the time of a parameter's first touch; None before it."""
    return getattr(parameter, "_lazycell_touched", None)


def is_touched(parameter: Parameter) -> bool:
    """Whether a parameter has taken part in a forward pass."""
    return touch_order(parameter) is not None


def _tell(event: str, subject: Any) -> None:
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
            if _postponed.parameters is None:
                _deferral.materialize(parameter)
            else:
                _postponed.parameters.append(parameter)
            parameter._lazycell_touched = next(_order)
            _tell("parameter_touched", parameter)


def _counts_as_use(owner: nn.Cell | None, parameter: Parameter | None = None) -> bool:
    """Whether reading a parameter now is a use: it is in a forward pass of any kind, but one.

    While something is compiled, its parser reads more than the graph comes to hold; what the graph holds is known
    once it is finished (`_graph_finished`). Parameters outside a compiled cell's tree are not seen there.
    """
    forward, compiled = internals.forward_running()
    if forward is internals.Forward.JIT:
        internals.when_function_is_compiled(_function_compiled)
        return False
    if compiled is None:
        return forward is not internals.Forward.NONE
    cells, parameters = _inside(compiled)
    return id(owner) not in cells and id(parameter) not in parameters


_inside_cache: dict[str, Any] = {}


def _inside(cell: nn.Cell) -> tuple[set[int], set[int]]:
    """The ids of the cells and parameters of a tree, computed once per compilation."""
    key = (id(cell), Structure.version)
    if _inside_cache.get("key") != key:
        cells = list(subtree(cell))
        parameters = {id(p) for current in cells for p in own_parameters(current)}
        _inside_cache.update(key=key, value=({id(current) for current in cells}, parameters))
    value: tuple[set[int], set[int]] = _inside_cache["value"]
    return value


def _read(parameter: Parameter) -> None:
    if internals.forward_running()[0] is internals.Forward.NONE:
        _deferral.materialize(parameter)
    elif _counts_as_use(None, parameter):
        touch(parameter)


_deferral.on_read = _read


def _use(state: CellState) -> None:
    with lock:
        if state.order is None:
            state.order = next(_order)
            cell = state.cell()
            if cell is not None:
                _tell("cell_used", cell)


# ---------------------------------------------------------------------------------------------
# What a tracked cell's parameters and children are kept in


class Parameters(OrderedDict[str, Any]):
    """The direct parameters of a tracked cell, all of them touched."""

    def __init__(self, state: CellState, items: Iterable[tuple[str, Parameter | None]]) -> None:
        super().__init__()
        self.state = state
        self.pending: set[str] = set()
        for name, parameter in items:
            self[name] = parameter

    def __setitem__(self, name: str, parameter: Parameter | None) -> None:
        super().__setitem__(name, parameter)
        Structure.version += 1
        if parameter is not None and not is_touched(parameter):
            self.pending.add(name)
            self.__class__ = WatchedParameters

    def __delitem__(self, name: str) -> None:
        super().__delitem__(name)
        self.pending.discard(name)
        Structure.version += 1

    def __deepcopy__(self, memo: dict[int, Any]) -> Parameters:
        copied = Parameters(copy.deepcopy(self.state, memo), ())
        memo[id(self)] = copied
        for name, parameter in OrderedDict.items(self):
            twin = copy.deepcopy(parameter, memo)
            if parameter is not None and is_touched(parameter):
                twin._lazycell_touched = touch_order(parameter)
            copied[name] = twin
        return copied


class WatchedParameters(Parameters):
    """The direct parameters of a tracked cell, some of them untouched: reading one in a forward pass touches it.

    Its methods don't call each other, nor super(): another thread may put the class back at any point.
    """

    def __getitem__(self, name: str) -> Parameter | None:
        parameter: Parameter | None = OrderedDict.__getitem__(self, name)
        if name in self.pending and (is_touched(parameter) or _counts_as_use(self.state.cell())):
            _touch_entries(self, [name])
        return parameter

    def items(self) -> Any:
        _listed(self, sys._getframe().f_back)
        return OrderedDict.items(self)

    def values(self) -> Any:
        _listed(self, sys._getframe().f_back)
        return OrderedDict.values(self)


def _listed(parameters: Parameters, frame: FrameType | None) -> None:
    """Someone goes through all parameters: a finished compilation, the user's construct, or mere bookkeeping."""
    if not parameters.pending:
        return
    finished = internals.finished_graph(frame)
    if finished is not None:
        cell, used = finished
        _graph_finished([cell], used, reports=state_of(cell) is None)  # a tracked cell reports when its call returns
    elif internals.listed_by_user(frame) and _counts_as_use(parameters.state.cell()):
        _touch_entries(parameters, list(parameters.pending))


def _touch_entries(parameters: Parameters, names: list[str]) -> None:
    """Note that some of a cell's parameters are being read."""
    with lock:
        for name in names:
            parameter = OrderedDict.get(parameters, name)
            if parameter is not None:
                touch(parameter)
            parameters.pending.discard(name)
        _settle(parameters)
        _use(parameters.state)


def _settle(parameters: Parameters) -> None:
    if not parameters.pending:
        parameters.__class__ = Parameters


class Children(OrderedDict[str, Any]):
    """The children of a tracked cell: whoever adds one, in whichever way, adds it to the tracking."""

    def __setitem__(self, name: str, child: nn.Cell | None) -> None:
        super().__setitem__(name, child)
        Structure.version += 1
        if child is not None:
            adopt(child)
            state = state_of(child)
            if state is not None and state.where is None:
                state.where = user_location()

    def __delitem__(self, name: str) -> None:
        super().__delitem__(name)
        Structure.version += 1


def own_parameters(cell: nn.Cell) -> list[Parameter]:
    """The direct parameters of a cell, without reading them."""
    return [parameter for parameter in OrderedDict.values(cell._params) if parameter is not None]


def own_children(cell: nn.Cell) -> list[tuple[str, nn.Cell]]:
    """The direct children of a cell, by name."""
    return [(name, child) for name, child in OrderedDict.items(cell._cells) if child is not None]


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


def hidden_parameters(cell: nn.Cell) -> list[Parameter]:
    """The parameters that a cell keeps where a read can't be seen: in tuples, lists, dicts, plain attributes."""
    found: dict[int, Parameter] = {}
    stack: list[Any] = [value for value in cell.__dict__.values() if not isinstance(value, (Parameters, Children))]
    seen: set[int] = set()
    while stack:
        value = stack.pop()
        if isinstance(value, Parameter):
            found[id(value)] = value
        elif isinstance(value, (list, tuple, dict, set)) and id(value) not in seen:
            seen.add(id(value))
            stack.extend(value.values() if isinstance(value, dict) else value)
    return list(found.values())


# ---------------------------------------------------------------------------------------------
# Watching cells


_watched_classes: weakref.WeakKeyDictionary[type, weakref.ref[type]] = weakref.WeakKeyDictionary()


def begin(cell: nn.Cell) -> CellState:
    """Start to track a cell: give it a state, and mappings that see reads and additions."""
    state = state_of(cell) or CellState(cell)
    cell.__dict__[_KEY] = state
    if not isinstance(cell._params, Parameters):
        cell.__dict__["_params"] = Parameters(state, list(cell._params.items()))
    if not isinstance(cell._cells, Children):
        children = Children()
        for name, child in cell._cells.items():
            OrderedDict.__setitem__(children, name, child)  # nothing is being assigned here
        cell.__dict__["_cells"] = children
    return state


def adopt(cell: nn.Cell) -> None:
    """Track a cell and all below it that aren't tracked yet; what has run before counts as used."""
    internals.require_known_internals()
    for current in list(subtree(cell)):
        if state_of(current) is None:
            begin(current)
            if internals.was_called(current):
                _use_untracked(current)
            else:
                watch(current)


def _use_untracked(cell: nn.Cell) -> None:
    """Count a cell whose use can't be tracked as used, with everything it holds."""
    state = begin(cell)
    state.called = state.completed = True
    _use(state)
    for parameter in own_parameters(cell) + hidden_parameters(cell):
        touch(parameter)


def watch(cell: nn.Cell) -> None:
    """Notice the next invocation of a tracked cell."""
    if is_watched(cell):
        return
    try:
        cell.__class__ = _watched_class(type(cell))
    except TypeError as error:
        name = type(cell).__name__
        warn(LazyCellWarning(f"{name} can't be watched ({error}); it is allocated now and counts as used."))
        _use_untracked(cell)


def is_watched(cell: nn.Cell) -> bool:
    """Whether a cell's next invocation will be noticed."""
    return "_lazycell_native" in type(cell).__dict__


def unwatch(cell: nn.Cell) -> None:
    """Put a cell's real class back."""
    native = type(cell).__dict__.get("_lazycell_native")
    if native is not None:
        cell.__class__ = native


def _watched_class(native: type) -> type:
    known = _watched_classes.get(native)
    made = known() if known is not None else None
    if made is None:
        namespace = {
            "__slots__": (),
            "__module__": native.__module__,
            "__qualname__": native.__qualname__,
            "__doc__": native.__doc__,
            "__call__": _watched_call(native),
            "construct": _WatchedConstruct(native),
            "_lazycell_native": native,
        }
        made = internals.subclass_unseen(native, namespace)
        _watched_classes[native] = weakref.ref(made)
    return made


def _watched_call(native: Any) -> Callable[..., Any]:
    """``__call__`` of a watched class."""

    @functools.wraps(native.__call__)
    def watched_call(cell: nn.Cell, *args: Any, **kwargs: Any) -> Any:
        return _run(cell, native.__call__, args, kwargs)

    return watched_call


class _WatchedConstruct:
    """``construct`` of a watched class: calling it is an invocation, looking at it is not."""

    def __init__(self, native: Any) -> None:
        @functools.wraps(native.construct)
        def watched_construct(cell: nn.Cell, *args: Any, **kwargs: Any) -> Any:
            return _run(cell, native.construct, args, kwargs)

        self._native = native
        self._function = watched_construct

    def __get__(self, cell: nn.Cell | None, owner: type) -> Any:
        if cell is None:
            return self._native.construct
        if internals.parser_asks(sys._getframe().f_back):
            _resolve(cell)
            if internals.forward_running()[0] is internals.Forward.JIT:
                internals.when_function_is_compiled(_function_compiled).append(cell)
            return cell.construct
        return MethodType(self._function, cell)


def _is_outermost(frame: FrameType | None) -> bool:
    """Whether no tracked cell is being run by this thread, not even one that is settled."""
    return not any(state_of(cell) for cell in internals.running_cells(frame))


def _enter(cell: nn.Cell, outermost: bool, compiles: bool) -> bool:
    """Note the invocation of a watched cell; from here on it runs as its real class.

    Args:
        cell: The cell.
        outermost: Whether no other tracked cell is being run.
        compiles: Whether the invocation compiles the cell rather than run its ``construct``.

    Returns:
        False if the cell isn't watched any more: another thread was faster, or its method was kept from before.
    """
    with lock:
        if not is_watched(cell):
            return False
        if outermost:
            adopt(cell)
        if compiles:
            _resolve(cell)
            return True
        state = begin(cell)
        state.called = True
        _use(state)
        for parameter in hidden_parameters(cell):
            touch(parameter)
        internals.prepare_first_call(cell)
        unwatch(cell)
        return True


def _run(cell: nn.Cell, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a watched cell: note its use, let the real class do the work, and see whether it completes."""
    called = sys._getframe().f_back  # the watched method
    outermost = _is_outermost(called.f_back if called is not None else None)
    entered = False
    try:
        entered = _enter(cell, outermost, internals.compiles(method))
        result = method(cell, *args, **kwargs)
    except BaseException:
        if entered and outermost:
            watch(cell)
        raise
    if entered:
        _complete(cell, outermost)
    return result


def _complete(cell: nn.Cell, outermost: bool) -> None:
    begin(cell).completed = True
    if outermost:
        for listener in completion_listeners:
            listener(cell)


# ---------------------------------------------------------------------------------------------
# Compilation


def _resolve(cell: nn.Cell) -> None:
    """A graph is being compiled that may call this cell; from here on it is parsed as its real class."""
    state = begin(cell)
    unwatch(cell)
    state.called = state.resolved = True
    registered = {id(p) for p in own_parameters(cell)}
    for parameter in hidden_parameters(cell):
        if id(parameter) not in registered:  # nothing of MindSpore's would fill it
            touch(parameter)
    if not any(own_parameters(current) for current in subtree(cell)):
        _use(state)
    cell._params.pending.add(_GRAPH)
    cell._params.__class__ = WatchedParameters


_GRAPH = ""  # an entry that no parameter has: it keeps a cell's parameters watched until the graph is finished


class BuiltIn(Protocol):
    """Something that a graph holds as it was when the graph was built."""

    def graph_finished(self) -> None: ...


def note_in_compilation(thing: BuiltIn) -> None:
    """Have something told when the function that is being compiled is compiled, before its graph runs."""
    if internals.forward_running()[0] is internals.Forward.JIT:
        internals.when_function_is_compiled(_function_compiled).append(thing)


def _function_compiled(noted: list[nn.Cell | BuiltIn], parameters: list[Parameter]) -> None:
    _graph_finished([thing for thing in noted if isinstance(thing, nn.Cell)], parameters, reports=True)
    for thing in noted:
        if not isinstance(thing, nn.Cell):
            thing.graph_finished()


def _graph_finished(cells: list[nn.Cell], parameters: list[Parameter], reports: bool) -> None:
    """A cell, or a function that calls some, has been compiled; nothing has run yet.

    Args:
        cells: The compiled cell, or the cells that the function resolved.
        parameters: The parameters that the graph holds.
        reports: Whether the outermost tracked cells complete a forward pass by this.
    """
    outermost: list[nn.Cell] = []
    inner: set[int] = set()
    with lock:
        for parameter in parameters:
            touch(parameter)
        for current in list(subtree(*cells)):
            state = state_of(current)
            if state is None:
                continue
            if id(current) not in inner:
                inner.update(map(id, subtree(current)))
                if state.resolved and not state.completed:
                    outermost.append(current)
            _forget_touched(current._params)
            state.completed = state.completed or state.resolved
            state.resolved = False
    for current in outermost if reports else ():
        _complete(current, outermost=True)


def _forget_touched(parameters: Parameters) -> None:
    parameters.pending -= {name for name in parameters.pending if _is_done(OrderedDict.get(parameters, name))}
    _settle(parameters)


def _is_done(parameter: Parameter | None) -> bool:
    return parameter is None or is_touched(parameter)


def reset(cell: nn.Cell) -> None:
    """Forget all touches of a cell and of all below it; storage stays."""
    for current in list(subtree(cell)):
        state = begin(current)
        state.forget()
        for parameter in own_parameters(current) + hidden_parameters(current):
            parameter._lazycell_touched = None
        current.__dict__["_params"] = Parameters(state, list(OrderedDict.items(current._params)))
        watch(current)
    _tell("touches_forgotten", cell)


def can_be_released(parameter: Parameter) -> bool:
    """Whether a parameter has storage that nothing has needed so far."""
    return not is_touched(parameter) and not _deferral.is_deferred(parameter)
