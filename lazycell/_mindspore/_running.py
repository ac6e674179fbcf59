"""What MindSpore is doing, told from the Python stack."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from enum import Enum
from types import FrameType
from typing import Any

import mindspore
from mindspore import context, nn

from lazycell._mindspore._optimizers import is_layer_class


def in_graph_mode() -> bool:
    """Whether calling a cell compiles it instead of running its ``construct`` in Python."""
    # Not get_context(), which takes ten times as long: this is asked at each step.
    return bool(context._get_mode() == mindspore.GRAPH_MODE) and os.getenv("MS_JIT") != "0"


def compiles(method: Callable[..., Any]) -> bool:
    """Whether a cell's method compiles the cell: only ``Cell.__call__`` does, in Graph mode."""
    return method is nn.Cell.__call__ and in_graph_mode()


_API_MODULES = ("mindspore.common.api", "mindspore.graph.api")  # the second: MindSpore 2.9 and later
_PARSER_MODULES = ("mindspore._extends.parse", "mindspore.graph._parse")  # likewise
_RECORDERS = ("_pynative_forward_run", "_pynative_func_grad_forward")  # likewise
_LISTINGS = frozenset(
    ("parameters_and_names", "get_parameters", "trainable_params", "untrainable_params", "parameters_dict")
)
_RUNNERS = frozenset(("__call__", "construct", "watched_call", "watched_construct"))  # the last two: _tracking's


PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep  # all of lazycell


def module_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__"))


def stack(frame: FrameType | None) -> Iterator[FrameType]:
    """A frame and its callers, innermost first.

    MindSpore compiles both sides of a branch in threads of its own, which have no Python stack. What they ask
    counts as asked by the compilation that is under way.
    """
    ours = True
    while frame is not None:
        ours = ours and frame.f_code.co_filename.startswith(PACKAGE)
        yield frame
        frame = frame.f_back
    if ours:
        for other in sys._current_frames().values():
            yield from (f for f in callers_of(other) if is_compiling(f))


def callers_of(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _cell_run_by(frame: FrameType) -> nn.Cell | None:
    code = frame.f_code
    if code.co_name not in _RUNNERS or not code.co_argcount:
        return None
    cell = frame.f_locals.get(code.co_varnames[0])
    return cell if isinstance(cell, nn.Cell) else None


def running_cells(frame: FrameType | None) -> Iterator[nn.Cell]:
    """The cells whose ``__call__`` or ``construct`` a frame is inside of, innermost first."""
    return (cell for cell in map(_cell_run_by, stack(frame)) if cell is not None)


def is_compiling(frame: FrameType) -> bool:
    return frame.f_code.co_name == "compile" and module_of(frame) in _API_MODULES


def zeros_are_made() -> bool:
    """Whether MindSpore's executor asks for a weight in order to give zeros for its gradient: no pass used it."""
    asking = asked_by(sys._getframe())
    return asking is not None and asking.f_code.co_name == "grad" and module_of(asking) in _API_MODULES


def is_recording(frame: FrameType) -> bool:
    # The executor's own flag, requires_grad(), stays on after an exception in a differentiated function.
    return frame.f_code.co_name in _RECORDERS and module_of(frame) == "mindspore.ops.composite.base"


class Forward(Enum):
    """What kind of forward pass a thread is inside of."""

    NONE = "none"
    PYTHON = "python"
    JIT = "a function that is being compiled"
    GRAPH = "a cell that is being compiled"


def forward_running() -> tuple[Forward, nn.Cell | None]:
    """Whether this thread is inside a forward pass, and the cell if one is being compiled as a whole.

    That is: some cell's ``construct`` or ``__call__`` is on the stack, a function or a cell is being compiled,
    or gradients are being recorded. The stack says so exactly, and costs settled cells nothing:
    only the first read of an untouched parameter ever asks.
    """
    for frame in stack(sys._getframe(1)):
        if is_compiling(frame):
            cell = frame.f_locals.get("obj")
            return (Forward.GRAPH, cell) if isinstance(cell, nn.Cell) else (Forward.JIT, None)
        if is_recording(frame) or _cell_run_by(frame) is not None:
            return Forward.PYTHON, None
    return Forward.NONE, None


def asked_by(frame: FrameType) -> FrameType | None:
    """The frame that called another one, not counting lazycell's own."""
    callers = callers_of(frame.f_back)
    return next((caller for caller in callers if not caller.f_code.co_filename.startswith(PACKAGE)), None)


def listed_by_user(frame: FrameType | None) -> bool:
    """Whether a listing of parameters was asked for by the user's code, not by MindSpore's bookkeeping.

    A cell's first call lists the parameters of its whole subtree to check their names; that must
    not count as reading them. ``frame`` is the one that iterates over a cell's own parameters.
    """
    callers = (caller for caller in callers_of(frame) if caller.f_code.co_name not in _LISTINGS)
    asking = next(callers, None)
    return asking is not None and not module_of(asking).startswith("mindspore.")


def parser_asks(frame: FrameType | None) -> bool:
    """Whether a frame belongs to MindSpore's graph parser, which must see a cell's real methods."""
    return frame is None or is_compiling(frame) or module_of(frame).startswith(_PARSER_MODULES)


_native_compile_phase = nn.Cell.compile_phase


def _set_compile_phase(cell: nn.Cell, phase: str) -> None:
    if phase != cell._compile_phase:
        _native_compile_phase.fset(cell, phase)


# MindSpore tells all cells of a net at each call in Graph mode, dead ones too, which graph is about to run. Only a
# compilation asks for it; so a cell that knows already leaves those below it alone.
compile_phase = property(_native_compile_phase.fget, _set_compile_phase)


def is_layer(cell: nn.Cell) -> bool:
    """Whether a cell is a layer of a net: no optimizer, nor a helper of MindSpore's own.

    Such helpers are those that ``recompute()`` makes: they refer to the parameters of the cell they belong to.
    """
    return is_layer_class(type(cell)) and type(cell).__module__ != "mindspore.common.recompute"


def is_cells_own_code(frame: FrameType) -> bool:
    """Whether a frame runs the code of ``nn.Cell`` itself."""
    return module_of(frame) == "mindspore.nn.cell"


def assigned_by_library(frame: FrameType | None) -> bool:
    """Whether a cell that is being assigned to another is MindSpore's choice, not the user's.

    Its wrapper cells keep cells of their own. Containers are filled by MindSpore's code as well, for the user.
    """
    for caller in callers_of(frame):
        module = module_of(caller)
        if not is_cells_own_code(caller) and not caller.f_code.co_filename.startswith(PACKAGE):
            return module.startswith("mindspore.") and module != "mindspore.nn.layer.container"
    return False


def is_library_layer(cell: nn.Cell) -> bool:
    """Whether a cell is a layer of MindSpore's own, whose children the user didn't choose."""
    containers = (nn.CellList, nn.CellDict, nn.SequentialCell)
    return type(cell).__module__.startswith("mindspore.") and not isinstance(cell, containers)


def prepare_first_call(cell: nn.Cell) -> None:
    """Do what a cell's first call does before ``construct``, except filling its parameters.

    ``Cell.__call__`` would fill all direct parameters, read or not. Once the names are checked, it
    skips both.
    """
    if not cell._is_check_and_refresh:
        cell._self_check()


def was_called(cell: nn.Cell) -> bool:
    """Whether a plain cell has been called before lazycell knew it."""
    return bool(cell._is_check_and_refresh)
