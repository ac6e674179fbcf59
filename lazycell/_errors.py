"""Exceptions, warnings, and the line of the user's code they point at."""

from __future__ import annotations

import contextlib
import os
import runpy
import sys
import warnings
from types import FrameType
from typing import TYPE_CHECKING

import mindspore

if TYPE_CHECKING:
    from lazycell._layers import LayerRecord

_NOT_THE_USERS = (
    os.path.dirname(os.path.abspath(__file__)) + os.sep,
    os.path.dirname(os.path.abspath(str(mindspore.__file__))) + os.sep,
    contextlib.__file__,
    runpy.__file__,
    "<frozen ",
)


class LazyCellError(RuntimeError):
    """Something asked of lazycell can't be done; the message says what to do instead."""

    __module__ = "lazycell"


class UntouchedError(LazyCellError):
    """The touched parameters were needed before any forward pass had touched one."""

    __module__ = "lazycell"


class LazyCellWarning(UserWarning):
    """Base of lazycell's warnings: the model works, and something about it deserves a look."""

    __module__ = "lazycell"


class UnusedLayerWarning(LazyCellWarning):
    """Layers that were defined and never invoked: the model's author should remove or declare them.

    Attributes:
        layers: One `LayerRecord` for each topmost unused layer, with the totals of all below it.
        nbytes: Bytes of the parameters of all unused layers.
    """

    __module__ = "lazycell"

    def __init__(self, message: str, layers: tuple[LayerRecord, ...] = (), nbytes: int = 0) -> None:
        super().__init__(message)
        self.layers = layers
        self.nbytes = nbytes


class UntouchedWarning(LazyCellWarning):
    """A live list was read before any forward pass: the training script should run the net first."""

    __module__ = "lazycell"


def the_first(names: list[str]) -> str:
    """The first of some names, and how many more there are."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def is_library_code(frame: FrameType) -> bool:
    """Whether a frame runs code of lazycell, of MindSpore or of the interpreter, rather than the user's."""
    return frame.f_code.co_filename.startswith(_NOT_THE_USERS)


def user_location() -> str | None:
    """The innermost line of the user's code that is being run, as ``"file.py:12"``."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and is_library_code(frame):
        frame = frame.f_back
    return None if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


class Programs:
    """Whether somebody's program is being run by lazycell: its filters may make an error of its own warnings only."""

    running = False


def warn(warning: LazyCellWarning) -> None:
    """Issue a warning at the innermost line of the user's code."""
    level = 2  # warnings.warn counts from here: 1 is this line, 2 is our caller
    frame = sys._getframe(1)
    while is_library_code(frame) and frame.f_back is not None:
        frame = frame.f_back
        level += 1
    try:
        warnings.warn(warning, stacklevel=level)
    except LazyCellWarning:
        if not Programs.running:
            raise
        text = warnings.formatwarning(warning, type(warning), frame.f_code.co_filename, frame.f_lineno)
        with contextlib.suppress(OSError, ValueError, AttributeError):  # it may have closed or replaced the stream
            sys.stderr.write(text)
