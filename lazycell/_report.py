"""Reports about nets: as text, as JSON, as a page to look at."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import mindspore
from mindspore import nn

from lazycell import _mindspore as internals
from lazycell._html import page
from lazycell._registry import format_bytes, require_tracked
from lazycell._rows import LayerRow, NetReport, Reason, net_report

SCHEMA = "lazycell.report/1"
_MARKS = {Reason.NEVER_CALLED: "!", Reason.CUT_OFF: "!", Reason.NOT_IN_OPTIMIZER: "!"}
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


def render(nets: Sequence[NetReport], format: str) -> str:
    """Reports in one of the formats."""
    if format not in _FORMATS:
        raise ValueError(f"report() takes one of the formats {', '.join(map(repr, _FORMATS))}, but got {format!r}.")
    return _FORMATS[format](nets)


# ---------------------------------------------------------------------------------------------
# Text


def _text(nets: Sequence[NetReport]) -> str:
    return "\n\n".join(map(_tree, nets))


def _tree(net: NetReport) -> str:
    rows = [_columns(row) for row in net.layers]
    for index, row in enumerate(net.layers):  # the topmost of what is unused stands for all below it
        if row.reason is Reason.NEVER_CALLED and not row.detail.startswith("never"):
            rows[index] = (*rows[index][:4], "")
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = []
    for label, state, size, nbytes, note in rows:
        fixed = f"{label:<{widths[0]}}  {state:<{widths[1]}}  {size:>{widths[2]}}  {nbytes:>{widths[3]}}"
        lines.append(f"{fixed}  {note}".rstrip())
    return "\n".join([*lines, "", *_summary(net)])


def _columns(row: LayerRow) -> tuple[str, str, str, str, str]:
    mark = _MARKS.get(row.reason, " ") if row.reason and not row.optional else " "
    name = f"({row.key}): {row.cls_name}" if row.depth else row.cls_name
    indented = "  " * row.depth + name
    label = indented if len(indented) <= _LABEL_WIDTH else indented[: _LABEL_WIDTH - 2] + ".."
    size, nbytes = (f"{row.total_parameters:,}", format_bytes(row.total_nbytes)) if row.total_parameters else ("-", "-")
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
    if sums.num_steps:
        lines.append(f"gradients were computed {sums.num_steps} times" if sums.num_steps > 1 else "gradients: one step")
    else:
        lines.append("no gradient computation was seen")
    if net.times > 1:
        lines.append(f"{net.times} nets like this")
    return lines


# ---------------------------------------------------------------------------------------------
# JSON


def _json(nets: Sequence[NetReport]) -> str:
    import lazycell

    versions = {"lazycell": lazycell.__version__, "mindspore": mindspore.__version__}
    return json.dumps({"schema": SCHEMA, "versions": versions, "nets": [_net(net) for net in nets]}, indent=1)


def _net(net: NetReport) -> dict[str, Any]:
    layers = [{**asdict(row), "reason": row.reason.value if row.reason else None} for row in net.layers]
    return {"class": net.cls_name, "times": net.times, "summary": asdict(net.summary), "layers": layers}


_FORMATS: dict[str, Callable[[Sequence[NetReport]], str]] = {"text": _text, "json": _json, "html": page}
