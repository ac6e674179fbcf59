"""What takes long says so, on a terminal."""

from __future__ import annotations

import io
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


def test_prints_where_its_line_stands(impatient: None, capsys: pytest.CaptureFixture[str]) -> None:
    """What is printed meanwhile begins at the beginning of a line."""
    terminal = Terminal()
    with Progress("building", terminal) as progress:
        assert terminal.shown.wait(30)
        before = len(terminal.getvalue())
        progress.print("a result")
        assert terminal.getvalue()[before:].startswith("\r\x1b[K") or terminal.getvalue()[:before].endswith("\r\x1b[K")
    assert capsys.readouterr().out == "a result\n"


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
