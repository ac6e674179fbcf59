"""Graphs are compiled with known sizes: layers that wait for theirs get them from a dry run before."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mindspore import ParameterTuple, Tensor, nn

from lazycell import _mindspore as internals
from lazycell import _sizing
from lazycell._dry_run import touch_by, within
from lazycell._errors import UntouchedError, the_first
from lazycell._sizing import WaitingLayer, resolved_waiting, waiting_layer
from lazycell._touching import own_children, subtree
from lazycell._unsized import is_unsized, sizing_of

_WAITS = """\
what is being compiled holds layers that infer their size from their first input ({layers}), and a dry run before the \
compilation came to none. Call the net once in PyNative mode, or lazycell.dry_run(net, inputs), before."""


@contextmanager
def _with_sizes(compiled: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
    """Compile something inside; layers in it that wait for their sizes get them before, from a run for shapes.

    Of what holds an optimizer, only the net is run: where shapes alone don't do, the rest would make a step.
    """
    if not WaitingLayer.all:
        _hook.remove()
        yield
        return
    cells = [] if _was_run(compiled, args, kwargs) else within([compiled]).cells
    if any(map(waiting_layer, cells)):
        trains = any(internals.is_optimizer_class(type(cell)) for cell in cells)
        run = _only_net(compiled) if trains else compiled
        if run is None or _leaves_open((*args, *kwargs.values())):
            raise UntouchedError(_WAITS.format(layers=the_first(_waiting_in(cells))))
        _run(run, cells, args, kwargs)
    _refuse_weights_without_shape(compiled)
    resolved_waiting()
    try:
        yield
    except Exception as error:  # shapes that don't fit, if it was compiled with nominal ones
        names = resolved_waiting()
        if not names or isinstance(error, UntouchedError):
            raise
        raise UntouchedError(_WAITS.format(layers=the_first(names))) from error


def _refuse_weights_without_shape(compiled: Any) -> None:
    """Refuse what MindSpore's gradient functions are still to differentiate by; they would fail without a reason."""
    if not str(getattr(compiled, "__module__", None)).startswith("mindspore."):
        return
    enclosed = inspect.getclosurevars(compiled).nonlocals.values() if inspect.isfunction(compiled) else ()
    for weights in enclosed:
        for weight in weights if type(weights) in (list, tuple, ParameterTuple) else (weights,):
            if is_unsized(weight):
                raise sizing_of(weight).error(weight)


_runs: weakref.WeakKeyDictionary[Any, set[Any]] = weakref.WeakKeyDictionary()


def _was_run(compiled: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether this is known from before: MindSpore asks for a compilation at each call, and keeps what it has compiled.

    What waits after a run for shapes isn't used, and goes on to wait.
    """
    subject = compiled
    if isinstance(compiled, functools.partial):
        subject = compiled.args[0] if isinstance(compiled.args[0], nn.Cell) else compiled.func
    inputs = tuple(map(_described, (*args, *kwargs.values())))
    run = WaitingLayer.count, getattr(subject, "training", None), inputs
    known = _runs.setdefault(subject, set())
    if run in known:
        return True
    if len(known) > 100:  # numbers that change with each call
        known.clear()
    known.add(run)
    return False


def _leaves_open(inputs: Any) -> bool:
    """Whether a tensor in some inputs has a dimension of any size."""
    if isinstance(inputs, (list, tuple)):
        return any(map(_leaves_open, inputs))
    return isinstance(inputs, Tensor) and -1 in inputs.shape


def _described(value: Any) -> Any:
    if isinstance(value, Tensor):
        return tuple(value.shape), str(value.dtype)
    if isinstance(value, (list, tuple)):
        return tuple(map(_described, value))
    return repr(value)


def _run(function: Any, cells: list[nn.Cell], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    try:
        touch_by(function, args, kwargs, takes_gradients=True)
    except Exception as error:  # what failed may have come after all that waits
        if any(map(waiting_layer, cells)):
            raise UntouchedError(_WAITS.format(layers=the_first(_waiting_in(cells)))) from error


def _waiting_in(cells: list[nn.Cell]) -> list[str]:
    return [waiting.lazy for waiting in map(waiting_layer, cells) if waiting is not None]


def _only_net(cell: Any) -> nn.Cell | None:
    """What a training cell calls with its own arguments, as MindSpore's do: its one child with waiting layers."""
    if not isinstance(cell, nn.Cell):
        return None
    nets = [child for _, child in own_children(cell) if any(map(waiting_layer, subtree(child)))]
    return nets[0] if len(nets) == 1 else None


_hook = internals.AroundCompilations(_with_sizes)
_sizing.on_waiting = _hook.install
