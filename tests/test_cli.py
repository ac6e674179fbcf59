"""``python -m lazycell report``: builds a net, runs shapes through it, and says what is used."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import mindspore as ms
import pytest

import lazycell
from lazycell import _cli

NETS = """
import mindspore as ms
from mindspore import nn, ops


class Net(nn.Cell):
    def __init__(self, width=4):
        super().__init__()
        self.body = nn.Dense(width, 2)
        self.dead = nn.Dense(width, 2)
        self.aux = nn.Dense(width, 2)

    def construct(self, x, y=None):
        out = self.body(x)
        if self.training:
            out = out + self.aux(x)
        return out if y is None else out + y


class Needs(nn.Cell):
    def __init__(self, width, *, depth):
        super().__init__()


class Embedding(nn.Cell):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(5, 3)

    def construct(self, x):
        return self.table(x)


class Group:
    factory = staticmethod(Net)


built = nn.SequentialCell(nn.Dense(4, 2))
number = 3


def broken():
    raise ValueError("no weights\\nat all")


def none():
    return None


async def later():
    return Net()


def exits():
    raise SystemExit(0)


def with_arguments():
    import argparse
    import sys
    assert sys.argv == ["nets"]
    argparse.ArgumentParser().parse_args()
    return Net()


class Shaped(nn.Cell):
    def construct(self, x):
        return ops.matmul(x, x)


class Wordy(Net):
    def construct(self, x):
        print("wordy", flush=True)
        return super().construct(x)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a module of nets, in which the command is given."""
    (tmp_path / "nets.py").write_text(NETS)
    (tmp_path / "faulty.py").write_text("import nonexistent_module")
    (tmp_path / "wrong.py").write_text("1 / 0")
    (tmp_path / "exits.py").write_text("raise SystemExit('first\\nsecond')")
    (tmp_path / "lengthy.py").write_text("raise ValueError('first\\nsecond')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    for name in ("nets", "faulty", "wrong", "exits", "lengthy"):
        sys.modules.pop(name, None)
    assert not lazycell.is_patched()


def unused(text: str) -> list[str]:
    """The layers that a report in text says were never called."""
    return [line.split("(")[1].split(")")[0] for line in text.splitlines() if "  never called" in line]


@pytest.mark.parametrize("mode", ["pynative", "graph"])
def test_says_what_is_unused(mode: str, capsys: pytest.CaptureFixture[str]) -> None:
    """In both modes, in training and not; without a warning besides."""
    assert _cli.main(["report", "nets:Net", "--input", "3,4", "--mode", mode]) == 0
    assert unused(capsys.readouterr().out) == ["dead", "aux"]
    ms.set_context(mode=ms.PYNATIVE_MODE)
    assert _cli.main(["report", "nets:Net", "--input", "3,4:float32", "--mode", mode, "--train"]) == 0
    captured = capsys.readouterr()
    assert unused(captured.out) == ["dead"] and captured.err == ""


def test_fails_if_asked_to() -> None:
    """With 3 if something is unused, and only then."""
    assert _cli.main(["report", "nets:Net", "--input", "3,4", "--fail-on-unused"]) == 3
    assert _cli.main(["report", "nets:built", "--input", "3,4", "--fail-on-unused"]) == 0


def test_inputs_and_factories(capsys: pytest.CaptureFixture[str]) -> None:
    """Several inputs, other dtypes, dimensions that vary; attributes of attributes."""
    assert _cli.main(["report", "nets:Group.factory", "--input", "3,4", "--input", "3,2"]) == 0
    assert _cli.main(["report", "nets:Embedding", "--input", "?,7:int32"]) == 0
    assert "1 of 1 layers used" in capsys.readouterr().out


@pytest.mark.parametrize("suffix", ["txt", "json", "html", "JSON"])
def test_to_a_file(suffix: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In the format of its name; nothing is printed then."""
    assert _cli.main(["report", "nets:Net", "--input", "3,4", "--report", f"out.{suffix}"]) == 0
    told = (folder / f"out.{suffix}").read_text(encoding="utf-8")
    assert capsys.readouterr().out == ""
    if suffix.lower() == "json":
        assert json.loads(told)["nets"][0]["summary"]["num_layers"] == 3
    assert {"txt": "layers used", "json": '"schema"', "html": "<!DOCTYPE html>"}[suffix.lower()] in told


MISTAKES = {
    "no module": (["absent:Net"], "there is no module 'absent'"),
    "a module that lacks another": (["faulty:Net"], "no module 'nonexistent_module', which 'faulty:Net' needs"),
    "a module that fails": (["wrong:Net"], "importing 'wrong' failed: ZeroDivisionError: division by zero"),
    "no factory": (["nets:Missing"], "'nets' has no 'Missing'; it has Net, Needs, Embedding, Group"),
    "no colon": (["nets.Net"], "expected PACKAGE.MODULE:FACTORY, as models.resnet:resnet18, but got 'nets.Net'"),
    "arguments": (["nets:Needs"], "nets:Needs needs arguments (width, depth)"),
    "no net": (["nets:none"], "nets:none gives an object of type NoneType, not a mindspore.nn.Cell"),
    "an asynchronous factory": (["nets:later"], "nets:later gives an object of type coroutine, not a"),
    "nothing to call": (["nets:number"], "nets:number is of type int, which can't be called for a net"),
    "a module that exits": (["exits:Net"], "importing 'exits' failed: SystemExit: first"),
    "a module that fails at length": (["lengthy:Net"], "importing 'lengthy' failed: ValueError: first"),
    "a factory that exits": (["nets:exits"], "nets:exits() failed: SystemExit: 0"),
    "a factory that fails": (["nets:broken"], "nets:broken() failed: ValueError: no weights"),
    "a size": (["nets:Net", "--input", "3,four"], "but got '3,four': sizes are whole numbers"),
    "a negative size": (["nets:Net", "--input", "3,-4"], "but got '3,-4': sizes are whole numbers"),
    "a dtype": (["nets:Net", "--input", "3,4:float33"], "'float33' is no dtype of MindSpore"),
    "no dtype": (["nets:Net", "--input", "3,4:Tensor"], "'Tensor' is no dtype of MindSpore"),
    "a shape": (["nets:Net", "--input", "3,5"], "forward pass of Net on spec(3, 5, dtype=Float32) failed: ValueError"),
    "no input": (["nets:Net"], "the forward pass of Net on no input failed: TypeError"),
    "a file": (["nets:Net", "--report", "out.pdf"], "--report takes a file that ends with .txt, .json, .html"),
    "a folder": (["nets:Net", "--report", "absent/out.txt"], "there is no folder"),
}


@pytest.mark.parametrize("mode", ["pynative", "graph"])
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes(mistake: str, mode: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One line each, and exit code 2."""
    arguments, text = MISTAKES[mistake]
    assert _cli.main(["report", *arguments, "--mode", mode]) == 2
    captured = capsys.readouterr()
    if mode == "graph" and "forward pass" in text:
        text = text[: text.rindex(":")]  # the compiler has errors of its own
    assert text in captured.err and captured.err.count("\n") == 1 and captured.out == ""


def test_debug_shows_where_an_error_comes_from(capsys: pytest.CaptureFixture[str]) -> None:
    """The traceback of what has caused it, and the line and the exit code as without."""
    assert _cli.main(["report", "nets:broken", "--debug"]) == 2
    told = capsys.readouterr().err
    assert 'raise ValueError("no weights\\nat all")' in told
    assert told.splitlines()[-1] == "python -m lazycell: error: nets:broken() failed: ValueError: no weights"


def test_arguments_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module or a factory that reads them doesn't find ours."""
    given = ["lazycell", "report", "whatever"]
    monkeypatch.setattr(sys, "argv", given)
    assert _cli.main(["report", "nets:with_arguments", "--input", "3,4"]) == 0
    assert sys.argv is given


def test_an_asynchronous_factory() -> None:
    """What it gives is refused, without a warning that nobody has awaited it."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert _cli.main(["report", "nets:later"]) == 2
        gc.collect()
    assert caught == []


@pytest.mark.parametrize("debug", [False, True])
def test_a_compilation_that_fails(debug: bool, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """MindSpore's log of it, and the folder that it makes, are there only if asked for."""
    before = set(folder.iterdir())
    options = ["report", "nets:Shaped", "--input", "3,4", "--mode", "graph", *(["--debug"] if debug else [])]
    assert _cli.main(options) == 2
    told = capfd.readouterr().err
    assert (told.count("\n") == 1) != debug and "failed: " in told
    made = {path.name for path in set(folder.iterdir()) - before} - {"__pycache__"}
    assert Path.cwd() == folder and (debug or not made)


@pytest.mark.parametrize("command, code", [
    ("report nets:Net --input 3,4 --fail-on-unused", 3), ("report nets:Net --input 3,4", 0), ("demo", 0),
])  # fmt: skip
def test_a_reader_that_has_seen_enough(command: str, code: int, folder: Path) -> None:
    """It changes no exit code, and nothing is said of it."""
    package = str(Path(lazycell.__file__).parents[1])
    full = ["bash", "-c", f"set -o pipefail; {sys.executable} -m lazycell {command} | true"]
    env = {**os.environ, "PYTHONPATH": package, "GLOG_v": "4"}
    done = subprocess.run(full, cwd=folder, env=env, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (code, "")


def test_a_file_that_can_no_longer_be_written(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The report isn't lost: it is printed."""

    def write_text(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left")

    monkeypatch.setattr(Path, "write_text", write_text)
    assert _cli.main(["report", "nets:Net", "--input", "3,4", "--report", "out.txt"]) == 0
    told = capsys.readouterr().out
    assert f"can't write {str(folder / 'out.txt')!r}: No space left." in told and unused(told) == ["dead", "aux"]
