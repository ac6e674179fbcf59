"""Run somebody's script under the patch, as if Python itself ran it, and report on its nets."""

from __future__ import annotations

import atexit
import builtins
import contextlib
import importlib.machinery
import importlib.util
import io
import os
import sys
import types
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from os import _exit
from typing import Any

from mindspore import nn

from lazycell import _mindspore as internals
from lazycell import _touching
from lazycell._aligned import Gradients, participants
from lazycell._errors import Programs
from lazycell._layers import tree
from lazycell._patch import patch
from lazycell._registry import users_own
from lazycell._report import optimized_parameters
from lazycell._rows import NetReport, net_report

_ROOT = "_lazycell_root"
_MOST_KINDS = 50  # of nets that are gone


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
        with io.open_code(_full(path)) as file:
            source = file.read()
    except OSError as error:
        raise CantRun(f"can't open {path!r}: {error.strerror}.") from error
    return compile(source, _full(path), "exec", dont_inherit=True)


def _full(path: str) -> str:
    return os.path.join(os.getcwd(), path)  # and not simplified, as Python does it


def run_script(path: str, arguments: list[str]) -> None:
    """Run a script as ``python path arguments`` would.

    Raises:
        CantRun: It can't be read.
    """
    sys.argv = [path, *arguments]
    if os.path.isdir(path) or zipfile.is_zipfile(path):  # as Python does, it runs the __main__ in there
        sys.path[0] = _full(path)
        spec = importlib.machinery.PathFinder.find_spec("__main__", [sys.path[0]])
        _execute(_code_of(spec, path), _main_module(spec, None))
        return
    _set_first_path(os.path.dirname(os.path.realpath(path)))
    loader = importlib.machinery.SourceFileLoader("__main__", _full(path))
    _execute(load_script(path), _main_module(None, loader))


def run_module(name: str, arguments: list[str]) -> None:
    """Run a module as ``python -m name arguments`` would.

    Raises:
        CantRun: There is no such module.
    """
    sys.argv = ["-m", *arguments]  # so it stands while packages above it are imported
    _set_first_path(os.getcwd())
    spec = _spec_of(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = _spec_of(name + ".__main__")
    code = _code_of(spec, name)
    sys.argv[0] = str(spec and spec.origin)
    _execute(code, _main_module(spec, None))


def _spec_of(name: str) -> importlib.machinery.ModuleSpec | None:
    parent = name.rpartition(".")[0]
    try:
        if parent:
            __import__(parent)
        return importlib.util.find_spec(name)
    except ImportError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # a package above it fails by itself
        raise CantRun(f"can't find {name!r}: {error}.") from error
    except ValueError as error:  # a name such as ".inner"
        raise CantRun(f"can't find {name!r}: {error}.") from error


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
    vars(module).update(__spec__=spec, __builtins__=builtins, __annotations__={})
    if spec is None:
        vars(module).update(__file__=loader.path, __cached__=None, __loader__=loader, __package__=None)
    else:
        vars(module).update(__file__=spec.origin, __cached__=spec.cached)
        vars(module).update(__loader__=spec.loader, __package__=spec.parent)
    return module


def _execute(code: types.CodeType, module: types.ModuleType) -> None:
    sys.modules["__main__"] = module  # and it stays: what the program leaves running looks it up
    exec(code, module.__dict__)


# ---------------------------------------------------------------------------------------------
# Its end


def hide_own_frames(error: BaseException) -> None:
    """Let the traceback of an exception that is about to end the process begin in the program.

    Whoever shows it, Python or a function of the program's own, gets it without our frames; Python does the rest.
    """
    shown = sys.excepthook

    def excepthook(kind: type[BaseException], error: BaseException, _: types.TracebackType | None) -> None:
        sys.last_traceback = trace
        shown(kind, error.with_traceback(trace), trace)

    trace = error.__traceback__
    while trace is not None and _is_own(trace.tb_frame):
        trace = trace.tb_next
    sys.excepthook = excepthook


def _is_own(frame: types.FrameType) -> bool:
    """Whether a frame is one of those that lead to the program."""
    name, package = (str(frame.f_globals.get(key)) for key in ("__name__", "__package__"))
    return name == "runpy" or package.partition(".")[0] == "lazycell"


class End:
    """What happens when a program is over, the threads that it has left included.

    Made before the program starts, it is told of last: by then, whatever the program does at its exit has been done.

    Attributes:
        well: Whether the program has ended well.
    """

    def __init__(self, tell: Callable[[Callable[[str], None]], int | None]) -> None:
        self.well = False
        self._tell = tell
        self._process = os.getpid()
        self._stream = sys.stderr
        atexit.register(self._come)

    def cancel(self) -> None:
        """There was no program."""
        atexit.unregister(self._come)

    def _come(self) -> None:
        if os.getpid() != self._process:  # a copy of it, which the program has forked
            return
        code = self._tell(self._write)
        if code is not None and self.well:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError, ValueError, AttributeError):
                    stream.flush()
            _exit(code)  # nothing else changes the exit code as late as this

    def _write(self, text: str) -> None:
        """Write to what was standard error when the program began, or to what Python started with; if one can."""
        for stream in filter(None, (self._stream, sys.__stderr__)):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.write(text)
                stream.flush()
                return


@contextmanager
def under_the_patch(nets: Nets) -> Iterator[None]:
    """What is in force from a program's beginning to its end."""
    Programs.running = True
    try:
        with patch(), nets.watched():
            yield
    finally:
        Programs.running = False


# ---------------------------------------------------------------------------------------------
# Its nets


class Nets:
    """The nets that a program builds and runs: those that are gone are reported on as they go.

    Attributes:
        left_out: How many of those that are gone are not reported on, since there were too many kinds.
        has_unused: Whether any had a layer that its author should remove or declare optional.
    """

    def __init__(self) -> None:
        self._kinds: dict[NetReport, _Kind] = {}
        self.left_out = 0
        self.has_unused = False

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Note nets from here on, and have all gradient computations looked at."""
        undo = internals.replace_attribute(nn.Cell, "__del__", self._with_report(nn.Cell.__del__))
        _touching.completion_listeners.append(self._completed)
        participants.add(self)
        try:
            yield
        finally:
            participants.discard(self)
            _touching.completion_listeners.remove(self._completed)
            undo()

    def took_part(self, gradients: Gradients) -> None:
        """Nothing to do: reports read what has been noted of every computation, now that somebody wants to know."""

    def _completed(self, cell: nn.Cell) -> None:
        for net in _nets_in(cell):
            vars(net)[_ROOT] = True

    def _with_report(self, native: Callable[[nn.Cell], None]) -> Callable[[nn.Cell], None]:
        def __del__(cell: nn.Cell) -> None:
            if _ROOT in vars(cell):
                self._note(cell, set(), is_gone=True)
            native(cell)

        return __del__

    def _note(self, net: nn.Cell, optimized: set[int], is_gone: bool) -> None:
        report = net_report(net, optimized)
        self.has_unused = self.has_unused or report.has_unused
        kind = self._kinds.get(report.kind)
        if kind is not None:
            kind.times += 1
            kind.latest = report
        elif is_gone and len(self._kinds) >= _MOST_KINDS:
            self.left_out += 1
        else:
            self._kinds[report.kind] = _Kind(report, _first_use(net))

    def reports(self) -> list[NetReport]:
        """Of those that are gone, and of those that there are, in the order of their first use."""
        alive = [cell for cell in internals.live_cells() if _touching.state_of(cell) is not None]
        inner = {id(child) for cell in alive for _, child in _touching.own_children(cell)}
        optimized = optimized_parameters()
        found: dict[int, nn.Cell] = {}
        for cell in sorted((cell for cell in alive if id(cell) not in inner), key=_first_use):
            found.update((id(net), net) for net in _nets_in(cell))
        for net in found.values():
            self._note(net, optimized, is_gone=False)
        kinds = sorted(self._kinds.values(), key=lambda kind: kind.first_use)
        return [replace(kind.latest, times=kind.times) for kind in kinds]


@dataclass
class _Kind:
    """Nets that have given the same report, but for the numbers of their steps."""

    latest: NetReport
    first_use: float
    times: int = 1


def _first_use(cell: nn.Cell) -> float:
    order = tree(cell)[0].order
    return float("inf") if order is None else order


def _nets_in(cell: nn.Cell) -> list[nn.Cell]:
    """A net, or those of the user that MindSpore's own wrappers hold; losses and activations are none."""
    root = tree(cell)[0]
    return [node.cell for node in users_own(root) or [root] if any(True for _ in node.cell.get_parameters())]
