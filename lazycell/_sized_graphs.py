"""Graphs are compiled with known sizes: layers that wait for theirs get them from a dry run before."""

from __future__ import annotations

from typing import Any

from mindspore import nn

from lazycell import _mindspore as internals
from lazycell import _sizing
from lazycell._dry_run import touch_by, within
from lazycell._errors import UntouchedError, the_first
from lazycell._sizing import WaitingLayer, waiting_layer
from lazycell._touching import own_children, subtree

_WAITS = """\
{layers} in what is being compiled infers its size from its first input, and a dry run before the compilation didn't \
come to it. Call the net once in PyNative mode, or lazycell.dry_run(net, inputs), before."""


def _size_before(compiled: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Run what is about to be compiled for its shapes, if layers in it wait for their sizes.

    Nothing that holds an optimizer: where shapes alone don't do, it would make a step.
    """
    if not WaitingLayer.all:
        _hook.remove()
        return
    cells = within([compiled]).cells
    if not any(map(waiting_layer, cells)):
        return
    trains = any(internals.is_optimizer_class(type(cell)) for cell in cells)
    run = _only_net(compiled) if trains else compiled
    cause = None
    try:
        if run is not None:
            touch_by(run, args, kwargs)
    except Exception as error:  # gradients, for one; the sizes may be known by now
        cause = error
    waiting = [found.lazy for found in map(waiting_layer, cells) if found is not None]
    if waiting and (cause is not None or run is None):
        raise UntouchedError(_WAITS.format(layers=the_first(waiting))) from cause


def _only_net(cell: Any) -> nn.Cell | None:
    """What a training cell calls with its own arguments, as MindSpore's do: its one child with waiting layers."""
    if not isinstance(cell, nn.Cell):
        return None
    nets = [child for _, child in own_children(cell) if any(map(waiting_layer, subtree(child)))]
    return nets[0] if len(nets) == 1 else None


_hook = internals.BeforeCompilation(_size_before)
_sizing.on_waiting = _hook.install
