"""What takes long says so, on a terminal."""

from __future__ import annotations

import io
import os
import re
import select
import struct
import sys
import threading

import pytest

from lazycell import _progress
from lazycell._progress import Progress


class Terminal(io.StringIO):
    """A terminal that notes what is written, and tells of the first line."""

    def __init__(self) -> None:
        super().__init__()
        self.shown = threading.Event()

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        count = super().write(text)
        if "(" in text:
            self.shown.set()
        return count


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long is a hundredth of a second."""
    monkeypatch.setattr(_progress, "_PATIENCE", 0.01)
    monkeypatch.setattr(_progress, "_PERIOD", 0.01)


def test_says_what_is_being_done(impatient: None) -> None:
    """And for how long; the line is gone at the end."""
    terminal = Terminal()
    with Progress("building", terminal) as progress:
        assert terminal.shown.wait(30)
        terminal.shown.clear()
        progress.begin("writing")
        while "writing" not in terminal.getvalue():
            assert terminal.shown.wait(30)
    assert terminal.getvalue().startswith("\r\x1b[Kbuilding (0 s)") and terminal.getvalue().endswith("\r\x1b[K")


def shown(text: str) -> list[str]:
    """The lines of a terminal to which a text was written."""
    lines = [""]
    for part in re.split(r"(\r\x1b\[K|\r?\n)", text):
        if part.endswith("\n"):
            lines.append("")
        else:
            lines[-1] = "" if part.startswith("\r") else lines[-1] + part
    return lines


@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_clears_its_line_for_others(impatient: None, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is printed meanwhile begins at the beginning of a line; while its own isn't complete, nothing is shown."""
    terminal = Terminal()
    monkeypatch.setattr(sys, name, terminal)
    with Progress("building", terminal):
        stream = getattr(sys, name)
        assert terminal.shown.wait(30)
        print("half ", end="", file=stream)
        terminal.shown.clear()
        assert not terminal.shown.wait(0.1)  # as long as it likes
        print("a line", file=stream)
        assert terminal.shown.wait(30)
        stream.writelines(["one\n", "two\n"])
        assert stream.isatty() and stream.getvalue() == terminal.getvalue()
    assert getattr(sys, name) is terminal
    print("last", file=stream)  # somebody may have kept it
    assert shown(terminal.getvalue()) == ["half a line", "one", "two", "last", ""]


def test_streams_that_others_have_replaced(impatient: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """They stay; and a stream that Python hasn't got is no trouble."""
    monkeypatch.setattr(sys, "stderr", None)
    monkeypatch.setattr(sys, "stdout", sys.stdout)
    other = io.StringIO()
    with Progress("building", Terminal()):
        sys.stdout = other
        assert sys.stderr is None
    assert sys.stdout is other
    with Progress("building"):
        pass


def test_lines_that_would_wrap(impatient: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are cut: only the last line of a terminal can be cleared."""
    monkeypatch.setenv("COLUMNS", "12")
    terminal = Terminal()
    with Progress("building (something)", terminal):
        assert terminal.shown.wait(30)
    assert set(terminal.getvalue().split("\r\x1b[K")) == {"", "building (s"}


def test_on_a_real_terminal(impatient: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has a width of its own; and where standard error leads meanwhile doesn't matter."""
    pty = pytest.importorskip("pty", reason="needs terminals")
    termios = pytest.importorskip("termios", reason="needs terminals")
    fcntl = pytest.importorskip("fcntl", reason="needs terminals")
    primary, secondary = pty.openpty()
    fcntl.ioctl(secondary, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 9, 0, 0))
    told = b""
    with open(secondary, "w", encoding="utf-8") as terminal, Progress("building", terminal):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        kept = os.dup(secondary)
        os.dup2(nowhere, secondary)
        while b"building" not in told and select.select([primary], [], [], 30)[0]:
            told += os.read(primary, 1000)
        os.dup2(kept, secondary)
        os.close(nowhere), os.close(kept)
    os.close(primary)
    assert set(told.decode().split("\r\x1b[K")) == {"", "building"}


def test_also_after_an_exception(impatient: None) -> None:
    """The line is gone before the error is shown."""
    terminal = Terminal()
    with pytest.raises(ValueError, match="boom"), Progress("building", terminal):
        assert terminal.shown.wait(30)
        raise ValueError("boom")
    assert terminal.getvalue().endswith("\r\x1b[K")
    assert not [thread for thread in threading.enumerate() if thread.name == "lazycell progress"]


def test_silent_if_it_is_quick() -> None:
    """Two seconds are not long."""
    terminal = Terminal()
    with Progress("building", terminal):
        pass
    assert terminal.getvalue() == ""


def test_silent_elsewhere(impatient: None) -> None:
    """In a file there is nothing of it, and no thread that would write it."""
    stream = io.StringIO()
    with Progress("building", stream):
        assert not [thread for thread in threading.enumerate() if thread.name == "lazycell progress"]
    assert stream.getvalue() == ""
