"""What is being read: the mappings that hold a tracked cell's parameters, and the graphs that come to hold them."""

from __future__ import annotations

import copy
import functools
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any, Protocol

from mindspore import Parameter, nn

from lazycell import _deferral
from lazycell import _mindspore as internals
from lazycell._touching import (
    CellState,
    Structure,
    complete,
    hold,
    is_frozen,
    is_touched,
    lock,
    mark_frozen,
    own_parameters,
    state_of,
    subtree,
    touch,
    touch_order,
    use,
)


def _counts_as_use(owner: nn.Cell | None, parameter: Parameter | None = None) -> bool:
    """Whether reading a parameter now is a use: it is in a forward pass of any kind, but one.

    While something is compiled, its parser reads more than the graph comes to hold; what the graph holds is known
    once it is finished (`graph_finished`). Parameters outside a compiled cell's tree are not seen there.
    """
    forward, compiled = internals.forward_running()
    if forward is internals.Forward.JIT:
        internals.when_function_is_compiled(function_compiled)
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
    if internals.forward_running()[0] is internals.Forward.NONE or internals.zeros_are_made():
        _deferral.materialize(parameter)
    elif _counts_as_use(None, parameter):
        touch(parameter)


_deferral.on_read = _read


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
            if parameter is not None and is_frozen(parameter):
                mark_frozen(twin, True)
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
    if internals.finished_graph(frame) is not None:
        _cell_compiled(frame)
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
        use(parameters.state)


def _settle(parameters: Parameters) -> None:
    if not parameters.pending:
        parameters.__class__ = Parameters


# ---------------------------------------------------------------------------------------------
# Graphs

GRAPH = ""  # an entry that no parameter has: it keeps a cell's parameters watched until the graph is finished


class BuiltIn(Protocol):
    """Something that a graph holds as it was when the graph was built."""

    def graph_finished(self, forget: internals.Forget) -> None:
        """Look at what was built; `StaleGraph` asks for another compilation, ``forget`` for one at the next call."""


def note_in_compilation(thing: BuiltIn) -> None:
    """Have something told when what is being compiled is compiled, before its graph runs."""
    forward, cell = internals.forward_running()
    if forward is internals.Forward.JIT:
        internals.when_function_is_compiled(function_compiled).append(thing)
    elif cell is not None:
        internals.when_cell_is_compiled(cell, _cell_compiled).append(thing)


def _cell_compiled(frame: FrameType | None) -> None:
    internals.settle_graph(frame, functools.partial(_cell_finished, frame))


def _cell_finished(frame: FrameType | None, forget: internals.Forget) -> None:
    finished = internals.finished_graph(frame)
    if finished is not None:
        cell, used = finished
        reports = state_of(cell) is None  # a tracked cell reports when its call returns
        graph_finished([cell], used, reports)
        internals.when_parameters_are_broadcast(frame, on_broadcast)
    for thing in internals.noted_in_compilation(frame):
        thing.graph_finished(forget)


def with_storage(cell: nn.Cell) -> dict[str, Parameter]:
    """What MindSpore broadcasts of a cell's parameters: all that have storage."""
    return {p.name: p for p in cell.get_parameters() if not (_deferral.is_deferred(p) or p.layerwise_parallel)}


on_broadcast: Callable[[nn.Cell], dict[str, Parameter]] = with_storage  # _together's own sees to the others


def function_compiled(noted: list[nn.Cell | BuiltIn], parameters: list[Parameter], forget: internals.Forget) -> None:
    """A function that calls tracked cells, or holds something built in, has been compiled; nothing has run yet."""
    graph_finished([thing for thing in noted if isinstance(thing, nn.Cell)], parameters, reports=True)
    for thing in noted:
        if not isinstance(thing, nn.Cell):
            thing.graph_finished(forget)


def graph_finished(cells: list[nn.Cell], parameters: list[Parameter], reports: bool) -> None:
    """A cell, or a function that calls some, has been compiled; nothing has run yet.

    Args:
        cells: The compiled cell, or the cells that the function resolved.
        parameters: The parameters that the graph holds.
        reports: Whether the outermost tracked cells complete a forward pass by this.
    """
    outermost: list[nn.Cell] = []
    tracked: list[CellState] = []
    inner: set[int] = set()
    with lock:
        for parameter in parameters:
            touch(parameter)
            hold(parameter)
        for current in list(subtree(*cells)):
            state = state_of(current)
            if state is None:
                continue
            tracked.append(state)
            if id(current) not in inner:
                inner.update(map(id, subtree(current)))
                outermost.append(current)
            _forget_touched(current._params)
        used = [state for state in tracked if state.resolved and state.order is not None]
        fresh = [cell for cell in outermost if _is_fresh(cell)]
        for cell in outermost:
            begun = state_of(cell)
            if begun is not None:
                begun.hold(parameters, used)
        for state in tracked:
            state.completed = state.completed or state.resolved
            state.resolved = False
    for cell in fresh if reports else ():
        complete(cell, outermost=True)


def _is_fresh(cell: nn.Cell) -> bool:
    """Whether a compilation has come across a cell that had not completed a forward pass before."""
    state = state_of(cell)
    return state is not None and state.resolved and not state.completed


def _forget_touched(parameters: Parameters) -> None:
    parameters.pending -= {name for name in parameters.pending if _is_done(OrderedDict.get(parameters, name))}
    _settle(parameters)


def _is_done(parameter: Parameter | None) -> bool:
    return parameter is None or is_touched(parameter)
