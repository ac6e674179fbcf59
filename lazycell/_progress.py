"""Say what takes so long, on a terminal."""

from __future__ import annotations

import sys
import threading
import time
from typing import TextIO

_PATIENCE = 2.0  # seconds of silence
_PERIOD = 0.5


class Progress:
    """A line on a terminal that says what is being done and for how long, if that is longer than two seconds.

    A context manager; the line is gone at its end. Elsewhere than on a terminal nothing is written.
    """

    def __init__(self, stage: str, stream: TextIO | None = None) -> None:
        self._stage = stage
        self._stream = sys.stderr if stream is None else stream
        self._started = time.monotonic()
        self._done = threading.Event()
        self._lock = threading.Lock()
        self._shown = False
        self._thread = threading.Thread(target=self._show, name="lazycell progress", daemon=True)

    def begin(self, stage: str) -> None:
        """Go on to something else."""
        self._stage = stage

    def print(self, text: str) -> None:
        """Print a text where the line stands."""
        with self._lock:
            if self._shown:
                self._write("")
                self._shown = False
            print(text, flush=True)

    def __enter__(self) -> Progress:
        if self._stream.isatty():
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        if self._thread.is_alive():
            self._thread.join()

    def _show(self) -> None:
        wait = _PATIENCE
        while not self._done.wait(wait):
            wait = _PERIOD
            with self._lock:
                self._shown = True
                self._write(f"{self._stage} ({time.monotonic() - self._started:.0f} s)")
        if self._shown:
            self._write("")

    def _write(self, text: str) -> None:
        self._stream.write(f"\r\x1b[K{text}")
        self._stream.flush()
