"""Run somebody's script under the patch, as if Python itself ran it, and report on its nets."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import io
import os
import sys
import threading
import types
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from mindspore import nn

from lazycell import _mindspore as internals
from lazycell import _touching
from lazycell._layers import tree
from lazycell._registry import users_own
from lazycell._report import optimized_parameters
from lazycell._rows import NetReport, net_report

_ROOT = "_lazycell_root"
_MOST_KINDS = 50  # of different reports that are kept of nets that are gone


class CantRun(Exception):
    """There is nothing to run; the message says why."""


# ---------------------------------------------------------------------------------------------
# The program


def load_script(path: str) -> types.CodeType:
    """The code of a script.

    Raises:
        CantRun: It can't be read.
    """
    try:
        with io.open_code(os.path.abspath(path)) as file:
            source = file.read()
    except OSError as error:
        raise CantRun(f"can't open {path!r}: {error.strerror}.") from error
    return compile(source, os.path.abspath(path), "exec", dont_inherit=True)


def run_script(path: str, arguments: list[str]) -> None:
    """Run a script as ``python path arguments`` would.

    Raises:
        CantRun: It can't be read.
    """
    sys.argv = [path, *arguments]
    full = os.path.abspath(path)
    if os.path.isdir(path) or zipfile.is_zipfile(path):  # as Python does, it runs the __main__ in there
        sys.path[0] = full
        spec = importlib.machinery.PathFinder.find_spec("__main__", [full])
        _execute(_code_of(spec, path), _main_module(spec, None))
        return
    _set_first_path(os.path.dirname(os.path.realpath(path)))
    loader = importlib.machinery.SourceFileLoader("__main__", full)
    _execute(load_script(path), _main_module(None, loader))


def run_module(name: str, arguments: list[str]) -> None:
    """Run a module as ``python -m name arguments`` would.

    Raises:
        CantRun: There is no such module.
    """
    _set_first_path(os.getcwd())
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(name + ".__main__")
    except ImportError as error:
        raise CantRun(f"can't find {name!r}: {error}.") from error
    code = _code_of(spec, name)
    sys.argv = [str(spec and spec.origin), *arguments]
    _execute(code, _main_module(spec, None))


def _code_of(spec: importlib.machinery.ModuleSpec | None, shown: str) -> types.CodeType:
    get_code = getattr(spec and spec.loader, "get_code", None)
    code = get_code(spec.name) if spec is not None and get_code is not None else None
    if not isinstance(code, types.CodeType):
        raise CantRun(f"there is nothing in {shown!r} that can be run.")
    return code


def _set_first_path(folder: str) -> None:
    """Python puts the program's folder first; it has put there what ``python -m lazycell`` needs."""
    if not getattr(sys.flags, "safe_path", False):  # Python 3.11 and later
        sys.path[0] = folder


def _main_module(spec: importlib.machinery.ModuleSpec | None, loader: Any) -> types.ModuleType:
    """The module that a program runs as, with the names that Python gives it, from a spec or from a script's loader."""
    module = types.ModuleType("__main__")
    vars(module).update(__spec__=spec, __builtins__=__builtins__, __annotations__={})
    if spec is None:
        vars(module).update(__file__=loader.path, __cached__=None, __loader__=loader, __package__=None)
    else:
        vars(module).update(__file__=spec.origin, __cached__=spec.cached)
        vars(module).update(__loader__=spec.loader, __package__=spec.parent)
    return module


def _execute(code: types.CodeType, module: types.ModuleType) -> None:
    sys.modules["__main__"] = module  # and it stays: what the program leaves running looks it up
    exec(code, module.__dict__)


def join_threads() -> None:
    """Wait for what the program has left running, as Python does at its end."""
    for thread in threading.enumerate():
        if thread is not threading.main_thread() and not thread.daemon:
            thread.join()


def hide_own_frames() -> None:
    """Let the traceback of an exception that nobody has caught begin in the program."""
    shown = sys.excepthook

    def excepthook(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
        while trace is not None and _is_own(trace.tb_frame):
            trace = trace.tb_next
        shown(kind, error.with_traceback(trace), trace)

    sys.excepthook = excepthook


def _is_own(frame: types.FrameType) -> bool:
    """Whether a frame is one of those that lead to the program."""
    name, package = (str(frame.f_globals.get(key)) for key in ("__name__", "__package__"))
    return name == "runpy" or package.partition(".")[0] == "lazycell"


# ---------------------------------------------------------------------------------------------
# Its nets


class Nets:
    """The nets that a program builds and runs: those that are gone are reported on as they go."""

    def __init__(self) -> None:
        self._gone: dict[NetReport, int] = {}
        self._left_out = 0

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Note nets from here on."""
        undo = internals.replace_attribute(nn.Cell, "__del__", self._with_report(nn.Cell.__del__))
        _touching.completion_listeners.append(self._completed)
        try:
            yield
        finally:
            _touching.completion_listeners.remove(self._completed)
            undo()

    def _completed(self, cell: nn.Cell) -> None:
        for net in _nets_in(cell):
            vars(net)[_ROOT] = True

    def _with_report(self, native: Callable[[nn.Cell], None]) -> Callable[[nn.Cell], None]:
        def __del__(cell: nn.Cell) -> None:
            if _ROOT in vars(cell):
                self._note(net_report(cell))
            native(cell)

        return __del__

    def _note(self, report: NetReport) -> None:
        if report in self._gone or len(self._gone) < _MOST_KINDS:
            self._gone[report] = self._gone.get(report, 0) + 1
        else:
            self._left_out += 1

    def reports(self) -> list[NetReport]:
        """Of those that are gone, and of those that there are."""
        alive = [cell for cell in internals.live_cells() if _touching.state_of(cell) is not None]
        inner = {id(child) for cell in alive for _, child in _touching.own_children(cell)}
        optimized = optimized_parameters()
        found: dict[int, nn.Cell] = {}
        for cell in sorted((cell for cell in alive if id(cell) not in inner), key=_first_use):
            found.update((id(net), net) for net in _nets_in(cell))
        for net in found.values():
            self._note(net_report(net, optimized))
        return [replace(report, times=times) for report, times in self._gone.items()]


def _first_use(cell: nn.Cell) -> float:
    order = tree(cell)[0].order
    return float("inf") if order is None else order


def _nets_in(cell: nn.Cell) -> list[nn.Cell]:
    """A net, or those of the user that MindSpore's own wrappers hold; losses and activations are none."""
    root = tree(cell)[0]
    return [node.cell for node in users_own(root) or [root] if any(True for _ in node.cell.get_parameters())]
