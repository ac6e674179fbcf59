"""What a report says of a net and of each of its layers."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from enum import Enum

from mindspore import Parameter, nn

from lazycell import _deferral
from lazycell._history import Steps, steps_of
from lazycell._layers import LayerRecord, LayerState, Node, records, tree
from lazycell._registry import topmost_unused, unused_below
from lazycell._touching import is_frozen, is_optimized, is_touched, own_parameters
from lazycell._unsized import is_unsized, num_bytes, num_elements

_CUT_OFF = "called, but cut off from the loss: no gradient arrived at it ({count})"


class Reason(Enum):
    """Why a layer has no gradient, or not always one."""

    NEVER_CALLED = "never_called"
    FROZEN = "frozen"
    CUT_OFF = "cut_off"
    NOT_IN_OPTIMIZER = "not_in_optimizer"
    SOME_STEPS = "some_steps"


_SAY_STEPS = (None, Reason.CUT_OFF, Reason.SOME_STEPS)  # their details do


@dataclass(frozen=True)
class LayerRow:
    """One layer of a report.

    Attributes:
        name: Dotted path from the net; empty for the net itself, which comes first.
        key: The last part of ``name``, by which its parent holds it.
        cls_name: Its class.
        depth: 0 for the net itself, 1 for its children, and so on.
        state: ``"deferred"``, ``"materialized"`` or ``"touched"``, as in `LayerRecord`.
        used: Whether it or anything below it was used.
        optional: Whether it is unused and may be: declared so, or kept inside a layer of MindSpore's own.
        num_parameters, nbytes: Of its own parameters; one that is shared counts where it comes first.
        total_parameters, total_nbytes: Of these and of all below it.
        deferred_nbytes: Bytes of all these that aren't allocated.
        order: Position in the order of first use, from 0; None for an unused layer and for the net itself.
        where: ``"file.py:12"``, the line at which it was assigned; None if that wasn't seen, and for the net itself.
        reason: Why its parameters have no gradient, or not always; None if nothing is known against it.
        detail: The same as a sentence, or what was seen where that is no reason yet; empty if there is nothing to say.
        sized: Whether the shapes of all these parameters are known; one that isn't counts 0.
    """

    name: str
    key: str
    cls_name: str
    depth: int
    state: str
    used: bool
    optional: bool
    num_parameters: int
    nbytes: int
    total_parameters: int
    total_nbytes: int
    deferred_nbytes: int
    order: int | None
    where: str | None
    reason: Reason | None
    detail: str
    sized: bool = True


@dataclass(frozen=True)
class Summary:
    """The sums of a report.

    Attributes:
        num_layers, used_layers, unused_layers: The net itself is not among them.
        num_parameters, touched_parameters: Elements.
        nbytes, allocated_nbytes, deferred_nbytes: Bytes of all parameters, of those with storage, and of those without.
        gradient_nbytes: Bytes that gradients of the untouched trainable parameters would have taken.
        moment_nbytes: Bytes that two moments of each of these, as Adam's, would have taken.
        num_steps: The most gradient computations that asked for one and the same parameter; 0 if none was seen.
    """

    num_layers: int
    used_layers: int
    unused_layers: int
    num_parameters: int
    touched_parameters: int
    nbytes: int
    allocated_nbytes: int
    deferred_nbytes: int
    gradient_nbytes: int
    moment_nbytes: int
    num_steps: int


@dataclass(frozen=True)
class NetReport:
    """All that a report says of one net.

    Attributes:
        cls_name: The net's class.
        layers: The net itself and all layers, parents before what is below them, in order of definition. Each layer's
            children are the rows after it, of a depth one greater, up to the next row that isn't deeper than it.
        summary: The sums.
        times: How many nets have given this very report.
    """

    cls_name: str
    layers: tuple[LayerRow, ...]
    summary: Summary
    times: int = 1

    @property
    def has_unused(self) -> bool:
        """Whether something was never called that its author should remove or declare optional.

        Of a net that was never run itself, nobody knows.
        """
        blamed = (row for row in self.layers if row.reason is Reason.NEVER_CALLED and not row.optional)
        return self.layers[0].used and any(blamed)

    @property
    def kind(self) -> NetReport:
        """What it has in common with the reports of nets that only went through more or fewer steps."""
        layers = (replace(row, detail="") if row.reason in _SAY_STEPS else row for row in self.layers)
        return NetReport(self.cls_name, tuple(layers), replace(self.summary, num_steps=0))

    def seen_from(self, folder: str) -> NetReport:
        """The same, with the places that are below a folder relative to it.

        Args:
            folder: Its absolute path.
        """
        prefix = os.path.join(folder, "")
        places = (row.where and row.where.removeprefix(prefix) for row in self.layers)
        return replace(self, layers=tuple(replace(row, where=place) for row, place in zip(self.layers, places)))


def net_report(cell: nn.Cell, optimized: set[int] | None = None) -> NetReport:
    """What can be said of a net now.

    Args:
        cell: A tracked cell.
        optimized: The ids of the parameters that some optimizer updates, besides those that a `LazyOptimizer` does.
    """
    nodes = tree(cell)
    net = _Net(nodes, optimized or set())
    layers = tuple(net.row(node, layer) for node, layer in zip(nodes, records(nodes)))
    return NetReport(type(cell).__name__, layers, net.summary())


class _Net:
    """What is computed once for all rows."""

    def __init__(self, nodes: list[Node], optimized: set[int]) -> None:
        self._nodes = nodes
        self._parameters = [parameter for node in nodes for parameter in node.parameters]
        self._steps = {id(parameter): steps_of(parameter) for parameter in self._parameters}
        self._num_steps = max((steps.asked for steps in self._steps.values()), default=0)
        updated = {id(parameter) for parameter in self._parameters if is_optimized(parameter)}
        self._optimized = updated | (optimized & set(self._steps))
        self._blamed = set(map(id, unused_below(topmost_unused(nodes[0]))))
        self._depth: dict[int, int] = {}
        self._totals = {id(node): list(node.parameters) for node in nodes}
        for node in nodes:
            self._depth[id(node)] = self._depth[id(node.parents[0])] + 1 if node.parents else 0
        for node in reversed(nodes):
            if node.parents:
                self._totals[id(node.parents[0])] += self._totals[id(node)]

    def row(self, node: Node, layer: LayerRecord) -> LayerRow:
        total = self._totals[id(node)]
        reason, detail = self._reason(node)
        prefix = node.parents[0].name + "." if node.parents and node.parents[0].name else ""
        return LayerRow(
            name=node.name,
            key=node.name[len(prefix) :],
            cls_name=layer.cls_name,
            depth=self._depth[id(node)],
            state=self._state(node, layer),
            used=node.order is not None,
            optional=node.order is None and id(node) not in self._blamed,
            num_parameters=layer.num_parameters,
            nbytes=layer.nbytes,
            total_parameters=sum(num_elements(p) for p in total),
            total_nbytes=sum(num_bytes(p) for p in total),
            deferred_nbytes=sum(num_bytes(p) for p in total if _deferral.is_deferred(p)),
            order=None if layer.order is None or not node.parents else layer.order - 1,
            where=layer.where if node.parents else None,
            reason=reason,
            detail=detail,
            sized=not any(map(is_unsized, total)),
        )

    def _state(self, node: Node, layer: LayerRecord) -> str:
        """As in its record; a container that isn't used is as far as what it holds."""
        total = self._totals[id(node)]
        if node.order is None and total and not any(map(_deferral.is_deferred, total)):
            return LayerState.MATERIALIZED.value
        return layer.state.value

    def _reason(self, node: Node) -> tuple[Reason | None, str]:
        """Why a layer's own parameters have no gradient, or not always."""
        if node.order is None:
            return Reason.NEVER_CALLED, self._why_unused(node)
        own = own_parameters(node.cell)
        if own and not any(p.requires_grad for p in own):
            by_freeze = ", as lazycell.freeze() made it" if any(map(is_frozen, own)) else ""
            return Reason.FROZEN, "requires no gradient" + by_freeze
        touched = [p for p in own if is_touched(p)]
        return self._reason_of_used(touched) if any(p.requires_grad for p in touched) else (None, "")

    def _why_unused(self, node: Node) -> str:
        root = self._nodes[0]
        if node is root:
            return "built, but never run"
        if root.order is None:
            return "within the net, which was never run"
        if node.parents and node.parents[0].order is None:
            return f"within {node.parents[0].name}, which was never called"
        if node.optional:
            return "never called, and declared optional"
        return "never called" if id(node) in self._blamed else "never called; it is MindSpore's own"

    def _reason_of_used(self, touched: list[Parameter]) -> tuple[Reason | None, str]:
        """What is known of a layer that was used and isn't frozen."""
        steps = [self._steps[id(p)] for p in touched]  # those frozen now have had theirs, too
        asked = [step for step in steps if step.asked]
        watched = not any(step.unwatched for step in asked)
        reached = max((step.reached for step in asked), default=0)
        if asked and watched and not reached:
            return Reason.CUT_OFF, _CUT_OFF.format(count=_counted(max(step.asked for step in asked)))
        if self._optimized and not any(id(p) in self._optimized for p in touched if p.requires_grad):
            return Reason.NOT_IN_OPTIMIZER, "not in the optimizer"
        if watched:
            return _some_steps(asked)
        return None, "" if reached else _hardly_watched(max(asked, key=lambda step: step.asked))

    def summary(self) -> Summary:
        layers = self._nodes[1:]
        touched = [p for p in self._parameters if is_touched(p)]
        unused = sum(num_bytes(p) for p in self._parameters if p.requires_grad and not is_touched(p))
        deferred = sum(num_bytes(p) for p in self._parameters if _deferral.is_deferred(p))
        total = sum(num_bytes(p) for p in self._parameters)
        used = sum(node.order is not None for node in layers)
        return Summary(
            num_layers=len(layers),
            used_layers=used,
            unused_layers=len(layers) - used,
            num_parameters=sum(num_elements(p) for p in self._parameters),
            touched_parameters=sum(num_elements(p) for p in touched),
            nbytes=total,
            allocated_nbytes=total - deferred,
            deferred_nbytes=deferred,
            gradient_nbytes=unused,
            moment_nbytes=2 * unused,
            num_steps=self._num_steps,
        )


def _counted(number: int) -> str:
    return "1 computation" if number == 1 else f"{number} computations"


def _some_steps(asked: list[Steps]) -> tuple[Reason | None, str]:
    """In which steps a layer was reached, if not in all that asked for one of its parameters."""
    most = max(asked, key=lambda step: (step.reached, -step.asked), default=Steps())
    if most.reached == most.asked:
        return None, ""
    when = f"first in step {most.first}, last in step {most.last}" if most.last > most.first else f"step {most.first}"
    return Reason.SOME_STEPS, f"reached in {most.reached} of {most.asked} steps: {when}"


def _hardly_watched(steps: Steps) -> str:
    """What is said if nothing was seen to arrive, but not all was looked at."""
    looked_at = steps.asked - steps.unwatched
    if not looked_at:
        return ""
    return f"no gradient arrived at it in {looked_at} of {_counted(steps.asked)}; the others weren't looked at"


def steps_in_words(num_steps: int) -> str:
    """What `Summary.num_steps` says."""
    if not num_steps:
        return "no gradient computation was seen"
    return f"{num_steps:,} gradient computation{'s' * (num_steps > 1)}"


def left_out_in_words(left_out: int) -> str:
    """That there were more nets than are reported on."""
    more = "1 more net of another kind is" if left_out == 1 else f"{left_out:,} more nets of other kinds are"
    return f"{more} left out"
