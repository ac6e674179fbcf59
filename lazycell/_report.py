"""Reports about nets: as text, as JSON, as a page to look at."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import mindspore
from mindspore import nn

from lazycell import _mindspore as internals
from lazycell._html import page
from lazycell._registry import format_bytes, require_tracked, shorten, sizes_in_words
from lazycell._rows import LayerRow, NetReport, Reason, left_out_in_words, net_report, steps_in_words

SCHEMA = "lazycell.report/1"
_MARKED = (Reason.NEVER_CALLED, Reason.CUT_OFF, Reason.NOT_IN_OPTIMIZER)
_LEGEND = "! never called, cut off from the loss, or not in the optimizer"
_LABEL_WIDTH = 56


def report(cell: nn.Cell, format: str = "text") -> str:
    """What of a net is used, what it holds, and for each layer without a gradient why it has none.

    A layer has none because it was never called; or it was called, but is cut off from the loss; or it is frozen; or
    it isn't in the optimizer; or it was reached in some steps only. What concerns steps is known of those that
    `value_and_grad` or `grad` computed (MindSpore's own under `patch`): of the first one of each function, and of all
    if there is a `LazyOptimizer`.

    Args:
        cell: A `LazyCell`, or any tracked cell.
        format: ``"text"``, a tree as ``print(net)`` shows it; ``"json"``, whose ``schema`` is
            ``"lazycell.report/1"``; or ``"html"``, one self-contained page.

    Raises:
        TypeError: ``cell`` is no cell.
        LazyCellError: Nothing in it is tracked.
        ValueError: There is no such format.

    Example:
        >>> import lazycell, mindspore as ms
        >>> from mindspore import nn
        >>> net = lazycell.track(nn.SequentialCell(nn.Dense(3, 2), nn.ReLU()))
        >>> y = net[0](ms.ops.ones((1, 3)))
        >>> print(lazycell.report(net).strip())
        SequentialCell  touched   8  32 B
            (0): Dense    touched   8  32 B
        !   (1): ReLU     deferred  -     -  never called
        <BLANKLINE>
        ! never called, cut off from the loss, or not in the optimizer
        1 of 2 layers used; 8 of 8 parameters touched
        32 B allocated, 0 B deferred
        no gradient computation was seen
    """
    return render([net_report(require_tracked(cell), optimized_parameters())], format)


def optimized_parameters() -> set[int]:
    """The ids of all parameters that some optimizer updates."""
    optimizers = [cell for cell in internals.live_cells() if internals.is_optimizer_class(type(cell))]
    held = (vars(cell).get("parameters") or vars(cell).get("_parameters") for cell in optimizers)
    return {id(parameter) for parameters in held if isinstance(parameters, tuple) for parameter in parameters}


def render(nets: Sequence[NetReport], format: str, left_out: int = 0, folder: str | None = None) -> str:
    """Reports in one of the formats.

    Args:
        nets: What was kept of them.
        format: As in `report`.
        left_out: How many nets there were besides.
        folder: Places below it are told relative to it, except in JSON; by default the current one.
    """
    if format not in _FORMATS:
        raise ValueError(f"report() takes one of the formats {', '.join(map(repr, _FORMATS))}, but got {format!r}.")
    if format != "json":
        nets = [net.seen_from(folder or _current_folder()) for net in nets]
    return _FORMATS[format](nets, left_out)


def _current_folder() -> str:
    try:
        return os.getcwd()
    except OSError:  # it is gone
        return os.sep


# ---------------------------------------------------------------------------------------------
# Text


def _text(nets: Sequence[NetReport], left_out: int) -> str:
    return "\n\n".join([*map(_tree, nets), *([left_out_in_words(left_out)] if left_out else [])])


def _tree(net: NetReport) -> str:
    rows = [_columns(row) for row in net.layers]
    for index, row in enumerate(net.layers):  # the topmost of what is unused stands for all below it
        if row.reason is Reason.NEVER_CALLED and row.detail.startswith("within"):
            rows[index] = (*rows[index][:4], "")
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = []
    for label, state, size, nbytes, note in rows:
        fixed = f"{label:<{widths[0]}}  {state:<{widths[1]}}  {size:>{widths[2]}}  {nbytes:>{widths[3]}}"
        lines.append(f"{fixed}  {note}".rstrip())
    legend = [_LEGEND] if any(row[0].startswith("!") for row in rows) else []
    return "\n".join([*lines, "", *legend, *_summary(net)])


def _columns(row: LayerRow) -> tuple[str, str, str, str, str]:
    mark = "!" if row.reason in _MARKED and not row.optional else " "
    name = f"({row.key}): {row.cls_name}" if row.depth else row.cls_name
    indented = "  " * row.depth + name
    label = shorten(indented, _LABEL_WIDTH)
    size, nbytes = sizes_in_words(row.total_parameters, row.total_nbytes, row.sized)
    where = f" ({row.where})" if row.detail and row.where else ""
    return f"{mark} {label}", row.state, size, nbytes, row.detail + where


def _summary(net: NetReport) -> list[str]:
    sums = net.summary
    lines = [
        f"{sums.used_layers} of {sums.num_layers} layers used; "
        f"{sums.touched_parameters:,} of {sums.num_parameters:,} parameters touched",
        f"{format_bytes(sums.allocated_nbytes)} allocated, {format_bytes(sums.deferred_nbytes)} deferred",
    ]
    if sums.gradient_nbytes:
        gradients, moments = format_bytes(sums.gradient_nbytes), format_bytes(sums.moment_nbytes)
        lines.append(f"unused parameters would have taken {gradients} of gradients and {moments} of two moments")
    lines.append(steps_in_words(sums.num_steps))
    if net.times > 1:
        lines.append(f"{net.times} nets like this")
    return lines


# ---------------------------------------------------------------------------------------------
# JSON


def _json(nets: Sequence[NetReport], left_out: int) -> str:
    import lazycell

    versions = {"lazycell": lazycell.__version__, "mindspore": mindspore.__version__}
    told = {"schema": SCHEMA, "versions": versions, "nets": [_net(net) for net in nets], "left_out": left_out}
    return json.dumps(told, indent=1)


def _net(net: NetReport) -> dict[str, Any]:
    layers = [{**asdict(row), "reason": row.reason.value if row.reason else None} for row in net.layers]
    return {"class": net.cls_name, "times": net.times, "summary": asdict(net.summary), "layers": layers}


_FORMATS: dict[str, Callable[[Sequence[NetReport], int], str]] = {"text": _text, "json": _json, "html": page}
