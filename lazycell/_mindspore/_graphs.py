"""Graphs: when they are compiled, what they hold, and how to have them compiled again."""

from __future__ import annotations

import functools
import gc
import inspect
import sys
import time
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any

import mindspore
from mindspore import Parameter, nn
from mindspore.ops.primitive import constexpr

from lazycell._mindspore._construction import replace_attribute
from lazycell._mindspore._running import asked_by, callers_of, is_compiling, module_of, stack
from lazycell._mindspore._versions import api


def finished_graph(frame: FrameType | None) -> tuple[nn.Cell, list[Parameter]] | None:
    """The cell that has just been compiled, and the parameters of its graph.

    MindSpore ends a cell's compilation with ``init_parameters_data()`` on it: a walk through the whole tree, at a
    time when the graph knows its parameters. ``frame`` is the one that may be that walk.
    """
    if frame is None or frame.f_code.co_name != "init_parameters_data":
        return None
    compiling = asked_by(frame)
    if compiling is None or not is_compiling(compiling):
        return None
    graphs = compiling.f_locals["self"]._graph_executor
    return compiling.f_locals["obj"], list(graphs.get_params(compiling.f_locals["phase"]).values())


_noted: weakref.WeakKeyDictionary[nn.Cell, tuple[str, list[Any]]] = weakref.WeakKeyDictionary()


def when_cell_is_compiled(cell: nn.Cell, finished: Callable[[FrameType], None]) -> list[Any]:
    """Ask for a call once a cell that is being compiled is compiled, with a frame for `finished_graph`.

    Returns:
        A list to note things in, for `noted_in_compilation`; one for each compilation.
    """
    phase = next(filter(is_compiling, stack(sys._getframe(1)))).f_locals["phase"]
    if _noted.get(cell, ("", []))[0] != phase:
        _noted[cell] = phase, []
    vars(cell)["init_parameters_data"] = functools.partial(init_parameters_data, cell, finished)
    return _noted[cell][1]


def noted_in_compilation(frame: FrameType | None) -> list[Any]:
    """What was noted in the compilation that `finished_graph` tells of; what one that failed has left is forgotten."""
    compiling = None if frame is None else asked_by(frame)
    if compiling is None or not is_compiling(compiling):
        return []
    phase, things = _noted.pop(compiling.f_locals["obj"], ("", []))
    return things if phase == compiling.f_locals["phase"] else []


def init_parameters_data(cell: nn.Cell, finished: Callable[[FrameType], None], *args: Any, **kwargs: Any) -> Any:
    """What stands in, once, for the method of this name on a cell that is being compiled."""
    vars(cell).pop("init_parameters_data", None)
    finished(sys._getframe())
    return cell.init_parameters_data(*args, **kwargs)


@constexpr(check=False)  # type: ignore[untyped-decorator]
def _is_none(value: object) -> bool:
    return value is None


def in_graph() -> bool:
    """Whether this is part of a graph: MindSpore's compiler parses it, and has no value for a function."""

    def function() -> int:
        return 0

    return _is_none(function)  # type: ignore[no-any-return]


def when_parameters_are_broadcast(frame: FrameType | None, prepare: Callable[[nn.Cell], dict[str, Parameter]]) -> None:
    """Ask for a call before MindSpore broadcasts the parameters of the cell that `finished_graph` has told of.

    It does so at the end of a cell's compilation, if ``parameter_broadcast`` is set.

    Args:
        frame: The frame that `finished_graph` was asked about.
        prepare: Given the cell, returns the parameters to broadcast, by name.
    """
    if mindspore.get_auto_parallel_context("parameter_broadcast"):
        compiling = None if frame is None else asked_by(frame)
        if compiling is not None and api.BROADCAST_PHASE not in compiling.f_locals["phase"]:
            cell = compiling.f_locals["obj"]
            vars(cell)["parameters_broadcast_dict"] = functools.partial(parameters_broadcast_dict, cell, prepare)


def parameters_broadcast_dict(cell: nn.Cell, prepare: Callable[[nn.Cell], dict[str, Parameter]]) -> Any:
    """What stands in, once, for the method of this name on a cell whose parameters are about to be broadcast."""
    vars(cell).pop("parameters_broadcast_dict", None)
    return prepare(cell)


Forget = Callable[[], None]  # lets what was compiled be compiled anew at its next call


class StaleGraph(Exception):
    """What has just been compiled holds something that has changed meanwhile; it has to be compiled again."""


def _forgetting(cache: set[str], phase: str) -> Forget:
    return lambda: cache.discard(phase)


def settle_graph(frame: FrameType | None, finished: Callable[[Forget], None]) -> None:
    """Have the cell whose compilation `finished_graph` has told of compiled again, until it isn't stale any more.

    Args:
        frame: The frame that `finished_graph` was asked about.
        finished: Called after each compilation. `StaleGraph` asks for another one; after any other exception the
            graph doesn't run, and the next call compiles the cell anew.
    """
    asking = None if frame is None else asked_by(frame)
    if asking is None:
        return
    compiling = asking.f_locals
    phase, cell = compiling["phase"], compiling["obj"]
    executor = compiling["self"]._graph_executor
    forget = _forgetting(cell.compile_cache, phase)
    while True:
        try:
            finished(forget)
            return
        except StaleGraph:
            arguments = compiling["args"], compiling["kwargs"]
            executor.generate_arguments_key(cell, *arguments, compiling["self"].enable_tuple_broaden)  # prepares them
            executor.compile(cell, *arguments, phase, compiling["jit_config_dict"])
        except BaseException:
            forget()
            raise


def when_function_is_compiled(finished: Callable[[list[Any], list[Parameter], Forget], None]) -> list[Any]:
    """Ask for a call once the function that this thread is compiling is compiled, before its graph first runs.

    MindSpore tells nobody. But its executor goes on to build the graph's arguments, by a method that
    can be replaced on that one object, for that one time.

    Args:
        finished: Called with the list that is returned here, the parameters of the graph, and what lets it be
            forgotten. `StaleGraph` asks for another compilation; after any other exception the graph doesn't run,
            and the next call compiles the function anew.

    Returns:
        A list to note things in; one for each compilation.
    """
    executor = next(filter(is_compiling, stack(sys._getframe(1)))).f_locals["self"]
    noted: list[Any] = vars(executor).setdefault("_lazycell_noted", [])
    if "_generate_run_args" in vars(executor):
        return noted
    native = executor._generate_run_args

    def _generate_run_args(*args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(1)
        phase, arguments, named = (caller.f_locals[name] for name in ("phase", "args_list", "kwargs"))
        forget = _forgetting(caller.f_globals["ms_compile_cache"], phase)
        try:
            while "_lazycell_noted" in vars(executor):
                things = vars(executor).pop("_lazycell_noted")
                try:
                    finished(things, list(executor._graph_executor.get_params(phase).values()), forget)
                except StaleGraph:
                    forget()
                    executor.compile(executor.fn.__name__, *arguments, **named)
        except BaseException:
            forget()
            raise
        finally:
            del executor._generate_run_args
            vars(executor).pop("_lazycell_noted", None)
        return native(*args, **kwargs)

    executor._generate_run_args = _generate_run_args
    return noted


def must_be_filled(parameter: Parameter, frame: FrameType | None) -> bool:
    """Whether a parameter that is asked to fill itself has to.

    Not if MindSpore fills a whole tree: for a graph, only those in the graph count; for ``save_checkpoint`` with
    a ``choice_func``, those that are saved are read by themselves. What the user asks for is done.
    ``frame`` is the one that asks.
    """
    listing = frame.f_back if frame is not None else None
    if listing is None or listing.f_code.co_name != "init_parameters_data":
        return True
    asking = asked_by(listing)
    if asking is None or not module_of(asking).startswith("mindspore."):
        return True
    finished = finished_graph(listing)
    return finished is not None and any(parameter is used for used in finished[1])


def filled_by_library(frame: FrameType | None) -> bool:
    """Whether MindSpore asks a parameter to fill itself on its way, rather than the user; ``frame`` is what asks."""
    return frame is not None and module_of(frame).startswith("mindspore.")


def _called_with(frame: FrameType, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """What a cell is called with for which a compilation was asked; after ``set_inputs()``, that leaves sizes open."""
    calling = next((caller for caller in callers_of(frame) if caller.f_code.co_name == "compile_and_run"), None)
    if calling is None or calling.f_locals.get("self") is not frame.f_locals.get("self"):
        return args
    given: tuple[Any, ...] = calling.f_locals.get("args", args)
    return given


class AroundCompilations:
    """Enters a context around every compilation, given what is compiled, cell or function, and its arguments.

    MindSpore tells nobody before it parses. For as long as this is installed, the methods that compile are replaced.
    """

    def __init__(self, context: Callable[[Any, tuple[Any, ...], dict[str, Any]], AbstractContextManager[None]]) -> None:
        self._context = context
        self._undo: list[Callable[[], bool]] = []

    def install(self) -> None:
        """Replace the methods; doing it twice is doing it once."""
        if not self._undo:
            self._undo.append(replace_attribute(type(api._cell_graph_executor), "compile", self._cells()))
            self._undo.append(replace_attribute(api._JitExecutor, "compile", self._functions()))

    def remove(self) -> None:
        """Put the methods back."""
        while self._undo:
            self._undo.pop()()

    def _cells(self) -> Callable[..., Any]:
        native, context = type(api._cell_graph_executor).compile, self._context
        options = set(inspect.signature(native).parameters)

        @functools.wraps(native)
        def compile_cell(executor: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
            inputs = _called_with(sys._getframe(1), args)
            with context(obj, inputs, {name: value for name, value in kwargs.items() if name not in options}):
                return native(executor, obj, *args, **kwargs)

        return compile_cell

    def _functions(self) -> Callable[..., Any]:
        native, context = api._JitExecutor.compile, self._context
        options = set(inspect.signature(native).parameters)

        @functools.wraps(native)
        def compile_function(executor: Any, method_name: str, *args: Any, **kwargs: Any) -> Any:
            function = executor.fn if executor.obj is None else functools.partial(executor.fn, executor.obj)
            with context(function, args, {name: value for name, value in kwargs.items() if name not in options}):
                return native(executor, method_name, *args, **kwargs)

        return compile_function


class ForwardGraphs:
    """Which parameters the graphs of a function hold; it is compiled once more for that, and never run.

    The graph of its gradients holds every parameter that gradients are asked for, used or not.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        def forward(*args):  # type: ignore[no-untyped-def]  # MindSpore's compiler parses this
            return function(*args)

        self._executor = api._JitExecutor(forward, time.time_ns())

    def parameters(self, args: tuple[Any, ...]) -> list[Parameter]:
        """The parameters of the graph that these arguments run."""
        phase = self._executor.compile("forward", *args)
        return list(self._executor._graph_executor.get_params(phase).values())


def live_cells() -> list[nn.Cell]:
    """All cells that there are; found by looking at every object of the interpreter."""
    return [thing for thing in gc.get_objects() if issubclass(type(thing), nn.Cell)]


def forget_graphs(cells: list[nn.Cell]) -> None:
    """Have all graphs that these cells are in, and all jitted functions, compiled anew at their next call.

    A graph belongs to the cell that was called, of which those inside know nothing: all live cells are looked at.
    """
    wanted = set(map(id, cells))
    for cell in live_cells():
        if getattr(cell, "compile_cache", None):
            if not wanted.isdisjoint(id(inner) for _, inner in cell.cells_and_names()):
                cell.compile_cache.clear()
    api.ms_compile_cache.clear()
