"""``python -m lazycell``: arguments and exit codes."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import inspect
import os
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

UNUSED = 3  # the exit code of --fail-on-unused
_FORMATS = {".txt": "text", ".json": "json", ".html": "html"}

_DESCRIPTION = "Lazy parameters for MindSpore: what of a net is used, and what the rest costs."


class Refusal(Exception):
    """What was asked for can't be done; the message is all that the user needs to see."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code.

    Args:
        arguments: The arguments without the program's name; by default those of the process.
    """
    given, program = _divided(list(sys.argv[1:] if arguments is None else arguments))
    options = _parser().parse_args(given)
    vars(options).update(program)
    command: Callable[[argparse.Namespace], int] = options.function
    try:
        return command(options)
    except Refusal as refusal:
        if getattr(options, "debug", False):
            traceback.print_exception(refusal)
        print(f"python -m lazycell: error: {refusal}", file=sys.stderr)
        return 2


def _divided(arguments: list[str]) -> tuple[list[str], dict[str, Any]]:
    """Our own arguments, and the program of ``run``: all that follows its name is its own, whatever it looks like."""
    if arguments[:1] != ["run"]:
        return arguments, {}
    at = 1
    while at < len(arguments) and arguments[at].startswith("-") and not arguments[at].startswith("-m"):
        if arguments[at] in ("-", "--"):
            break
        at += 2 if arguments[at] == "--report" else 1
    ours, program = arguments[:at], arguments[at:]
    is_module = bool(program) and program[0].startswith("-m")
    if is_module and program[0] != "-m":
        program[:1] = ["-m", program[0][2:]]  # as Python takes it
    if is_module or program[:1] == ["--"]:
        del program[0]
    return ours, {"is_module": is_module, "target": program[:1], "arguments": program[1:]}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m lazycell", description=_DESCRIPTION)
    commands = parser.add_subparsers(dest="command", required=True)
    demo = commands.add_parser("demo", help="one gradient step of a model with dead layers, eager and lazy")
    demo.set_defaults(function=_demo)

    run = commands.add_parser(
        "run", help="run a script under lazycell.patch(), and report on its nets", usage="%(prog)s [options] "
        "(SCRIPT | -m MODULE) [ARGS ...]", allow_abbrev=False,
        description="Run a script as Python would, with every cell lazy and tracked.",
    )  # fmt: skip
    run.add_argument("-m", metavar="MODULE", help="run a module, as python -m does")  # what it takes apart is said here
    _add_common(run, "where to write the report; to standard error if it isn't given")
    run.add_argument("target", metavar="SCRIPT", nargs="?", help="the script")
    run.add_argument("arguments", metavar="ARGS", nargs="*", help="its own arguments")
    run.set_defaults(function=_run, refuse=run.error)

    report = commands.add_parser(
        "report", help="build a net, run shapes through it, and report", description="Build a net, run shapes through "
        "it, and say what of it is used."
    )  # fmt: skip
    report.add_argument("factory", metavar="PACKAGE.MODULE:FACTORY", help="what to call, without arguments, for a net")
    report.add_argument(
        "--input", dest="inputs", metavar="SHAPE[:DTYPE]", action="append", default=[],
        help="an input, as 1,3,224,224:float32; once for each",
    )  # fmt: skip
    report.add_argument("--mode", choices=("pynative", "graph"), default="pynative", help="run it, or compile it")
    report.add_argument("--train", action="store_true", help="as in training, after set_train()")
    report.add_argument("--debug", action="store_true", help="show where an error comes from")
    _add_common(report, "where to write the report; to standard output if it isn't given")
    report.set_defaults(function=_report)
    return parser


def _add_common(parser: argparse.ArgumentParser, where: str) -> None:
    parser.add_argument("--report", dest="path", metavar="FILE", help=f"FILE.txt, .json or .html: {where}")
    parser.add_argument(
        "--fail-on-unused", action="store_true", help=f"exit with {UNUSED} if a layer was never called"
    )


def _demo(options: argparse.Namespace) -> int:
    from lazycell._demo import demo
    from lazycell._progress import Progress

    with Progress("one gradient step of each model"):
        return demo(lambda text: _print(f"{text}\n"))


def _print(text: str) -> None:
    """Write to standard output, as long as somebody reads it."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has seen enough; the rest, and what Python flushes in the end, goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


# ---------------------------------------------------------------------------------------------
# run


def _run(options: argparse.Namespace) -> int:
    if not options.target:
        options.refuse(f"the following arguments are required: {'MODULE' if options.is_module else 'SCRIPT'}")
    path, folder = _checked_path(options.path), os.getcwd()
    from lazycell._run import CantRun, End, Nets, hide_own_frames, run_module, run_script, under_the_patch

    nets, undo = Nets(), contextlib.ExitStack()

    def tell(write: Callable[[str], object]) -> int | None:
        reports = nets.reports()
        _tell(reports, path, write, nets.left_out, folder)
        undo.close()
        return UNUSED if options.fail_on_unused and nets.has_unused else None

    end = End(tell)
    undo.enter_context(under_the_patch(nets))
    try:
        (run_module if options.is_module else run_script)(options.target[0], options.arguments)
        end.well = True
    except CantRun as error:
        end.cancel()
        undo.close()
        raise Refusal(str(error)) from error
    except SystemExit as error:
        end.well = error.code in (None, 0)
        raise
    except BaseException as error:
        hide_own_frames(error)
        raise
    return 0


def _tell(
    nets: list[Any], path: Path | None, write: Callable[[str], object], left_out: int = 0, folder: str | None = None
) -> None:
    """Write the report to a file, or by a function; places below a folder are told relative to it."""
    from lazycell._report import render

    if not nets:
        write("lazycell: no net was run under lazycell.patch().\n")
    elif path is None:
        write(render(nets, "text", left_out, folder) + "\n")
    else:
        try:
            text = render(nets, _FORMATS[path.suffix.lower()], left_out, folder)
            path.write_text(text.rstrip("\n") + "\n", encoding="utf-8")
        except OSError as error:  # it has taken long to come to know this
            text = render(nets, "text", left_out, folder)
            write(f"lazycell: can't write {str(path)!r}: {error.strerror}.\n{text}\n")


def _checked_path(text: str | None) -> Path | None:
    """The absolute path of a file; one that can't be written is refused before anything has run."""
    if text is None:
        return None
    path = Path(text).absolute()
    if path.suffix.lower() not in _FORMATS:
        raise Refusal(f"--report takes a file that ends with {', '.join(_FORMATS)}, but got {text!r}.")
    if not path.parent.is_dir():
        raise Refusal(f"--report {text!r}: there is no folder {str(path.parent)!r}.")
    if not os.access(path if path.exists() else path.parent, os.W_OK) or path.is_dir():
        raise Refusal(f"--report {text!r} can't be written.")
    return path


# ---------------------------------------------------------------------------------------------
# report


def _report(options: argparse.Namespace) -> int:
    path = _checked_path(options.path)
    from lazycell._progress import Progress

    inputs = [_spec(text) for text in options.inputs]
    with Progress(f"importing {options.factory}") as progress, _arguments([options.factory.partition(":")[0]]):
        report = _report_on(options, inputs, progress.begin)
    _tell([report], path, _print)
    return UNUSED if options.fail_on_unused and report.has_unused else 0


def _report_on(options: argparse.Namespace, inputs: list[Any], begin: Callable[[str], object]) -> Any:
    """The report of the net that is asked for."""
    from mindspore import nn

    import lazycell
    from lazycell._report import optimized_parameters
    from lazycell._rows import net_report

    factory = _find(options.factory)
    with lazycell.patch(), warnings.catch_warnings():
        warnings.simplefilter("ignore", lazycell.UnusedLayerWarning)  # the report says it
        begin(f"building {options.factory}")
        net = factory if isinstance(factory, nn.Cell) else _attempt(f"{options.factory}()", factory)
        if inspect.iscoroutine(net):
            net.close()  # or it would warn that nobody awaits it
        if not isinstance(net, nn.Cell):
            raise Refusal(f"{options.factory} gives an object of type {type(net).__name__}, not a mindspore.nn.Cell.")
        lazycell.track(net).set_train(options.train)
        begin("running shapes through it" if options.mode == "pynative" else "compiling it")
        what = f"the forward pass of {type(net).__name__} on {', '.join(map(repr, inputs)) or 'no input'}"
        with _aside() if options.mode == "graph" and not options.debug else contextlib.nullcontext():
            _attempt(what, lambda: _touch(net, inputs, options.mode))
        begin("writing the report")
        return net_report(net, optimized_parameters())


@contextmanager
def _arguments(arguments: list[str]) -> Iterator[None]:
    """Let modules that read the arguments of the process find others than ours."""
    sys.argv, given = arguments, sys.argv
    try:
        yield
    finally:
        sys.argv = given


@contextmanager
def _aside() -> Iterator[None]:
    """Let MindSpore's compiler write its log and its folders to nowhere."""
    folder, kept = os.getcwd(), os.dup(2)
    with tempfile.TemporaryDirectory() as temporary, open(os.devnull, "w", encoding="utf-8") as nowhere:
        os.chdir(temporary)
        os.dup2(nowhere.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            os.chdir(folder)


def _touch(net: Any, inputs: list[Any], mode: str) -> None:
    import mindspore

    import lazycell

    if mode == "pynative":
        lazycell.dry_run(net, *inputs)
        return
    mindspore.set_context(mode=mindspore.GRAPH_MODE)
    net.compile(*(mindspore.ops.zeros(spec.shape, spec.dtype) for spec in inputs))


def _attempt(what: str, function: Callable[[], Any]) -> Any:
    """Call somebody's function; an exception becomes one line."""
    try:
        return function()
    except (Exception, SystemExit) as error:
        raise Refusal(f"{what} failed: {type(error).__name__}: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or "no message").splitlines()[0]


def _find(text: str) -> Any:
    """What ``PACKAGE.MODULE:FACTORY`` names."""
    module_name, colon, name = text.partition(":")
    if not (colon and module_name and name):
        raise Refusal(f"expected PACKAGE.MODULE:FACTORY, as models.resnet:resnet18, but got {text!r}.")
    sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise Refusal(f"there is no module {error.name!r}, which {text!r} needs.") from error
    except (Exception, SystemExit) as error:
        why = f"{type(error).__name__}: {_first_line(error)}"
        raise Refusal(f"importing {module_name!r} failed: {why}") from error
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            public = ", ".join(key for key, value in vars(module).items() if callable(value) and key[0] != "_")
            raise Refusal(f"{module_name!r} has no {name!r}; it has {public or 'nothing that can be called'}.")
        found = getattr(found, part)
    _refuse_arguments(text, found)
    return found


def _refuse_arguments(text: str, factory: Any) -> None:
    from mindspore import nn

    if isinstance(factory, nn.Cell):
        return
    if not callable(factory):
        raise Refusal(f"{text} is of type {type(factory).__name__}, which can't be called for a net.")
    try:
        parameters = inspect.signature(factory).parameters.values()
    except ValueError:  # written in C
        return
    needed = [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if needed:
        raise Refusal(f"{text} needs arguments ({', '.join(needed)}): name a function without any that calls it.")


def _spec(text: str) -> Any:
    """An input, as ``1,3,224,224:float32``."""
    import mindspore

    import lazycell

    shape, _, dtype_name = text.partition(":")
    dtype = getattr(mindspore, dtype_name or "float32", None)
    try:
        sizes = [None if size.strip() in ("?", "None") else int(size) for size in shape.split(",")]
        return lazycell.spec(*sizes, dtype=dtype)
    except (TypeError, ValueError) as error:
        why = f"{dtype_name!r} is no dtype of MindSpore" if "dtype" in str(error) else "sizes are whole numbers"
        raise Refusal(f"--input takes a shape and a dtype, as 1,3,224,224:float32, but got {text!r}: {why}.") from error
