"""What is being run: cells are watched until they have been invoked, and then left alone.

The class of a watched cell is a subclass, whose first call notes the use, puts the real class back, and goes on as
MindSpore does: a settled cell costs nothing.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable
from types import FrameType, MethodType
from typing import Any

from mindspore import Parameter, nn

from lazycell import _deferral
from lazycell import _mindspore as internals
from lazycell._errors import LazyCellWarning, user_location, warn
from lazycell._history import forget_steps
from lazycell._reading import GRAPH, Parameters, WatchedParameters, function_compiled, graph_finished
from lazycell._touching import (
    KEY,
    CellState,
    Structure,
    complete,
    hidden_parameters,
    hold,
    is_held,
    is_touched,
    lock,
    own_parameters,
    state_of,
    subtree,
    tell,
    touch,
    use,
)


class Children(OrderedDict[str, Any]):
    """The children of a tracked cell: whoever adds one, in whichever way, adds it to the tracking."""

    def __setitem__(self, name: str, child: nn.Cell | None) -> None:
        super().__setitem__(name, child)
        Structure.version += 1
        if child is not None and internals.is_layer(child):
            adopt(child)
            state = state_of(child)
            if state is not None and state.where is None:
                state.where = user_location()
                state.by_library = internals.assigned_by_library(sys._getframe(1))

    def __delitem__(self, name: str) -> None:
        super().__delitem__(name)
        Structure.version += 1


# Called with a cell that is about to be compiled, and its arguments.
compilation_listeners: list[Callable[[nn.Cell, tuple[Any, ...], dict[str, Any]], None]] = []


# ---------------------------------------------------------------------------------------------
# Watching cells


_watched_classes: weakref.WeakKeyDictionary[type, weakref.ref[type]] = weakref.WeakKeyDictionary()


def begin(cell: nn.Cell) -> CellState:
    """Start to track a cell: give it a state, and mappings that see reads and additions."""
    state = state_of(cell) or CellState(cell)
    cell.__dict__[KEY] = state
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
    state = state_of(cell)
    if state is not None and state.adopted_in == Structure.version:
        return
    for current in list(subtree(cell)):
        if state_of(current) is None:
            begin(current)
            if internals.was_called(current):
                _use_untracked(current)
            else:
                watch(current)
    begin(cell).adopted_in = Structure.version


def _use_untracked(cell: nn.Cell) -> None:
    """Count a cell whose use can't be tracked as used, with everything it holds."""
    state = begin(cell)
    state.called = state.completed = True
    use(state)
    for parameter in own_parameters(cell) + hidden_parameters(cell):
        touch(parameter)
        hold(parameter)


def watch(cell: nn.Cell) -> None:
    """Notice the next invocation of a tracked cell."""
    error = watch_if_possible(cell)
    if error is not None:
        name = type(cell).__name__
        warn(LazyCellWarning(f"{name} can't be watched ({error}); it is allocated now and counts as used."))
        _use_untracked(cell)


def watch_if_possible(cell: nn.Cell) -> TypeError | None:
    """Notice the next invocation of a cell, tracked or not; returns what keeps its class from being swapped, if any."""
    try:
        if not is_watched(cell):
            cell.__class__ = _watched_class(type(cell))
    except TypeError as error:
        return error
    return None


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
                internals.when_function_is_compiled(function_compiled).append(cell)
            return cell.construct
        return MethodType(self._function, cell)


def _is_outermost(cell: nn.Cell, frame: FrameType | None) -> bool:
    """Whether no other tracked cell is being run by this thread, not even one that is settled.

    The cell itself is if it was waiting for its sizes when it was called: it is watched from its ``construct`` on.
    """
    return not any(state_of(running) for running in internals.running_cells(frame) if running is not cell)


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
        use(state)
        for parameter in hidden_parameters(cell):
            touch(parameter)
        internals.prepare_first_call(cell)
        unwatch(cell)
        return True


def _run(cell: nn.Cell, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a watched cell: note its use, let the real class do the work, and see whether it completes."""
    called = sys._getframe().f_back  # the watched method
    outermost = _is_outermost(cell, called.f_back if called is not None else None)
    compiles = internals.compiles(method)
    for listener in compilation_listeners if outermost and compiles else ():
        listener(cell, args, kwargs)
    entered = False
    try:
        entered = _enter(cell, outermost, compiles)
        result = method(cell, *args, **kwargs)
    except BaseException:
        if entered and outermost:
            watch(cell)
        raise
    if entered:
        state = begin(cell)
        if state.resolved:  # nothing was compiled: a graph from before ran, which has told long ago what it holds
            for used in state.graph_states:
                use(used)
            graph_finished([cell], state.graph_parameters, reports=False)
        complete(cell, outermost)
    return result


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
        use(state)
    cell._params.pending.add(GRAPH)
    cell._params.__class__ = WatchedParameters


def reset(cell: nn.Cell) -> None:
    """Forget all touches of a cell and of all below it; storage stays."""
    for current in list(subtree(cell)):
        state = begin(current)
        state.forget()
        for parameter in own_parameters(current) + hidden_parameters(current):
            parameter._lazycell_touched = None
            forget_steps(parameter)
        current.__dict__["_params"] = Parameters(state, list(OrderedDict.items(current._params)))
        watch(current)
    tell("touches_forgotten", cell)


def can_be_released(parameter: Parameter) -> bool:
    """Whether a parameter has storage that nothing has needed so far."""
    return not (is_touched(parameter) or is_held(parameter) or _deferral.is_deferred(parameter))
