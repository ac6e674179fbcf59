"""``python -m lazycell report``: builds a net, runs shapes through it, and says what is used."""

from __future__ import annotations

import json
import sys
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
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a module of nets, in which the command is given."""
    (tmp_path / "nets.py").write_text(NETS)
    (tmp_path / "faulty.py").write_text("import nonexistent_module")
    (tmp_path / "wrong.py").write_text("1 / 0")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    for name in ("nets", "faulty", "wrong"):
        sys.modules.pop(name, None)
    assert not lazycell.is_patched()


def unused(text: str) -> list[str]:
    """The layers that a report in text says were never called."""
    return [line.split("(")[1].split(")")[0] for line in text.splitlines() if "never called" in line]


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


@pytest.mark.parametrize("suffix", ["txt", "json", "html"])
def test_to_a_file(suffix: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In the format of its name; nothing is printed then."""
    assert _cli.main(["report", "nets:Net", "--input", "3,4", "--report", f"out.{suffix}"]) == 0
    told = (folder / f"out.{suffix}").read_text(encoding="utf-8")
    assert capsys.readouterr().out == ""
    if suffix == "json":
        assert json.loads(told)["nets"][0]["summary"]["num_layers"] == 3
    assert {"txt": "layers used", "json": '"schema"', "html": "<!DOCTYPE html>"}[suffix] in told


MISTAKES = {
    "no module": (["absent:Net"], "there is no module 'absent'"),
    "a module that lacks another": (["faulty:Net"], "no module 'nonexistent_module', which 'faulty:Net' needs"),
    "a module that fails": (["wrong:Net"], "importing 'wrong' failed: ZeroDivisionError: division by zero"),
    "no factory": (["nets:Missing"], "'nets' has no 'Missing'; it has Net, Needs, Embedding, Group"),
    "no colon": (["nets.Net"], "expected PACKAGE.MODULE:FACTORY, as models.resnet:resnet18, but got 'nets.Net'"),
    "arguments": (["nets:Needs"], "nets:Needs needs arguments (width, depth)"),
    "no net": (["nets:none"], "nets:none gives a NoneType, not a mindspore.nn.Cell"),
    "nothing to call": (["nets:number"], "nets:number is a int, which can't be called for a net"),
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


def test_debug_shows_where_an_error_comes_from() -> None:
    """The refusal comes out, with its cause."""
    with pytest.raises(_cli.Refusal) as raised:
        _cli.main(["report", "nets:broken", "--debug"])
    assert isinstance(raised.value.__cause__, ValueError)


def test_a_file_that_can_no_longer_be_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The report isn't lost: it is printed."""

    def write_text(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left")

    monkeypatch.setattr(Path, "write_text", write_text)
    assert _cli.main(["report", "nets:Net", "--input", "3,4", "--report", "out.txt"]) == 0
    told = capsys.readouterr().out
    assert "can't write 'out.txt': No space left." in told and unused(told) == ["dead", "aux"]
