"""``python -m lazycell``: arguments and exit codes."""

from __future__ import annotations

import argparse
import importlib
import inspect
import os
import sys
import warnings
from collections.abc import Callable, Sequence
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
    options = _parser().parse_args(arguments)
    command: Callable[[argparse.Namespace], int] = options.function
    try:
        return command(options)
    except Refusal as refusal:
        if getattr(options, "debug", False):
            raise
        print(f"python -m lazycell: error: {refusal}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m lazycell", description=_DESCRIPTION)
    commands = parser.add_subparsers(dest="command", required=True)
    demo = commands.add_parser("demo", help="one gradient step of a model with dead layers, eager and lazy")
    demo.set_defaults(function=_demo)

    run = commands.add_parser(
        "run", help="run a script under lazycell.patch(), and report on its nets", usage="%(prog)s [options] "
        "(SCRIPT | -m MODULE) [ARGS ...]", description="Run a script as Python would, with every cell lazy and tracked."
    )  # fmt: skip
    run.add_argument("-m", dest="is_module", action="store_true", help="run a module, as python -m does")
    _add_common(run, "where to write the report; to standard error if it isn't given")
    run.add_argument("target", metavar="SCRIPT", help="the script, or with -m the module")
    run.add_argument("arguments", metavar="ARGS", nargs=argparse.REMAINDER, help="its own arguments")
    run.set_defaults(function=_run)

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
    from lazycell._progress import Progress

    with Progress("importing MindSpore") as progress:
        from lazycell._demo import demo

        progress.begin("one gradient step of each model")
        return demo(progress.print)


# ---------------------------------------------------------------------------------------------
# run


def _run(options: argparse.Namespace) -> int:
    _check_path(options.path)
    from lazycell._patch import patch
    from lazycell._run import CantRun, Nets, hide_own_frames, join_threads, run_module, run_script

    hide_own_frames()
    nets = Nets()
    with patch(), nets.watched():
        try:
            (run_module if options.is_module else run_script)(options.target, options.arguments)
            join_threads()
        except CantRun as error:
            raise Refusal(str(error)) from error
        except SystemExit as error:
            join_threads()
            failed = error.code not in (None, 0)
            if _tell(nets.reports(), options, sys.stderr.write) and not failed:
                return UNUSED
            raise
        except BaseException:
            _tell(nets.reports(), options, sys.stderr.write)
            raise
        return UNUSED if _tell(nets.reports(), options, sys.stderr.write) else 0


def _tell(nets: list[Any], options: argparse.Namespace, write: Callable[[str], object]) -> bool:
    """Write the report; whether it is a reason to fail."""
    from lazycell._report import render

    if not nets:
        write("lazycell: no net was run.\n")
    elif options.path is None:
        write(render(nets, "text") + "\n")
    else:
        try:
            Path(options.path).write_text(render(nets, _FORMATS[Path(options.path).suffix]), encoding="utf-8")
        except OSError as error:  # it has taken long to come to know this
            write(f"lazycell: can't write {options.path!r}: {error.strerror}.\n{render(nets, 'text')}\n")
    return bool(options.fail_on_unused) and any(net.has_unused for net in nets)


def _check_path(path: str | None) -> None:
    """Refuse a file that can't be written, before anything has run."""
    if path is None:
        return
    if Path(path).suffix not in _FORMATS:
        raise Refusal(f"--report takes a file that ends with {', '.join(_FORMATS)}, but got {path!r}.")
    folder = Path(path).absolute().parent
    if not folder.is_dir():
        raise Refusal(f"--report {path!r}: there is no folder {str(folder)!r}.")
    if not os.access(path if Path(path).exists() else folder, os.W_OK) or Path(path).is_dir():
        raise Refusal(f"--report {path!r} can't be written.")


# ---------------------------------------------------------------------------------------------
# report


def _report(options: argparse.Namespace) -> int:
    _check_path(options.path)
    from lazycell._progress import Progress

    with Progress("importing MindSpore") as progress:
        from mindspore import nn

        import lazycell
        from lazycell._report import optimized_parameters
        from lazycell._rows import net_report

        inputs = [_spec(text) for text in options.inputs]
        progress.begin(f"importing {options.factory}")
        factory = _find(options.factory)
        with lazycell.patch(), warnings.catch_warnings():
            warnings.simplefilter("ignore", lazycell.UnusedLayerWarning)  # the report says it
            progress.begin(f"building {options.factory}")
            net = factory if isinstance(factory, nn.Cell) else _attempt(f"{options.factory}()", factory)
            if not isinstance(net, nn.Cell):
                raise Refusal(f"{options.factory} gives a {type(net).__name__}, not a mindspore.nn.Cell.")
            lazycell.track(net).set_train(options.train)
            progress.begin("running shapes through it" if options.mode == "pynative" else "compiling it")
            what = f"the forward pass of {type(net).__name__} on {', '.join(map(repr, inputs)) or 'no input'}"
            _attempt(what, lambda: _touch(net, inputs, options.mode))
            progress.begin("writing the report")
            reports = [net_report(net, optimized_parameters())]
    return UNUSED if _tell(reports, options, sys.stdout.write) else 0


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
    except Exception as error:
        first = (str(error).strip() or "no message").splitlines()[0]
        raise Refusal(f"{what} failed: {type(error).__name__}: {first}") from error


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
    except Exception as error:
        raise Refusal(f"importing {module_name!r} failed: {type(error).__name__}: {error}") from error
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
        raise Refusal(f"{text} is a {type(factory).__name__}, which can't be called for a net.")
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
