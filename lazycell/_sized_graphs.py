"""Graphs are compiled with known sizes: layers that wait for theirs get them from a dry run before."""

from __future__ import annotations

from typing import Any

from lazycell import _mindspore as internals
from lazycell import _sizing
from lazycell._dry_run import touch_by, within


def _size_before(compiled: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Run what is about to be compiled for its shapes, if a layer in it waits for its sizes."""
    if not _sizing.WaitingLayer.all:
        _hook.remove()
    elif any(_sizing.waiting_layer(cell) for cell in within([compiled]).cells):
        touch_by(compiled, args, kwargs)


_hook = internals.BeforeCompilation(_size_before)
_sizing.on_waiting = _hook.install
