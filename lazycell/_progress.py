"""Say what takes so long, on a terminal."""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
from typing import Any, TextIO

_PATIENCE = 2.0  # seconds of silence
_PERIOD = 0.5


class Progress:
    """A line on a terminal that says what is being done and for how long, if that is longer than two seconds.

    A context manager; the line is gone at its end, and wherever something is printed meanwhile. Elsewhere than on a
    terminal nothing is written.
    """

    def __init__(self, stage: str, stream: TextIO | None = None) -> None:
        self._stage = stage
        self._stream = sys.stderr if stream is None else stream
        self._started = time.monotonic()
        self._done = threading.Event()
        self._lock = threading.RLock()
        self._is_own = self._shown = False
        self._amid_a_line = False  # somebody else's
        self._replaced: dict[str, tuple[Any, Any]] = {}
        self._thread = threading.Thread(target=self._show, name="lazycell progress", daemon=True)

    def begin(self, stage: str) -> None:
        """Go on to something else."""
        self._stage = stage

    def __enter__(self) -> Progress:
        if self._stream is not None and self._stream.isatty():  # Python has none if the program's is closed
            self._stream, self._is_own = _of_its_own(self._stream)
            for name in ("stdout", "stderr"):
                stream = getattr(sys, name)
                if stream is not None:
                    self._replaced[name] = stream, _Clearing(stream, self)
                    setattr(sys, name, self._replaced[name][1])
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        if self._thread.is_alive():
            self._thread.join()
        for name, (stream, clearing) in self._replaced.items():
            if getattr(sys, name) is clearing:
                setattr(sys, name, stream)
        if self._is_own:
            self._stream.close()

    def write_through(self, stream: TextIO, text: str) -> int:
        """Write somebody's text to a stream, where the line stands."""
        with self._lock:
            self._clear()
            if text:
                self._amid_a_line = not text.endswith("\n")
            return stream.write(text)

    def _show(self) -> None:
        wait = _PATIENCE
        while not self._done.wait(wait):
            wait = _PERIOD
            with self._lock:
                if not self._amid_a_line:
                    self._shown = True
                    text = f"{self._stage} ({time.monotonic() - self._started:.0f} s)"
                    self._write(text[: _columns(self._stream) - 1])  # a line that wraps can't be cleared
        with self._lock:
            self._clear()

    def _clear(self) -> None:
        if self._shown:
            self._shown = False
            self._write("")

    def _write(self, text: str) -> None:
        self._stream.write(f"\r\x1b[K{text}")
        self._stream.flush()


class _Clearing:
    """Stands in for a stream, and clears the line before anything is written."""

    def __init__(self, stream: TextIO, progress: Progress) -> None:
        self._stream, self._progress = stream, progress

    def write(self, text: str) -> int:
        """As the stream's."""
        return self._progress.write_through(self._stream, text)

    def writelines(self, lines: list[str]) -> None:
        """As the stream's."""
        self.write("".join(lines))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _of_its_own(stream: TextIO) -> tuple[TextIO, bool]:
    """The same terminal, even if what the stream leads to is changed meanwhile; whether it has to be closed."""
    try:
        descriptor = os.dup(stream.fileno())
    except (OSError, ValueError):  # it is made of nothing but Python
        return stream, False
    return open(descriptor, "w", encoding=stream.encoding, errors="replace"), True


def _columns(stream: TextIO) -> int:
    try:
        return os.get_terminal_size(stream.fileno()).columns or shutil.get_terminal_size().columns
    except (OSError, ValueError):
        return shutil.get_terminal_size().columns
