"""Which gradient computations each parameter took part in; for reports."""

from __future__ import annotations

import threading
import weakref

from mindspore import Parameter

_KEY = "_lazycell_steps"
_lock = threading.RLock()


class Steps:
    """The gradient computations that a parameter took part in, by their numbers among those of its net, from 1.

    Attributes:
        latest: The last one that asked for its gradient; 0 if none did.
        first, last: The first and the last one in which a gradient arrived at it; 0 if none did.
        reached: In how many one arrived.
    """

    def __init__(self) -> None:
        self.latest = self.first = self.last = self.reached = 0


def steps_of(parameter: Parameter) -> Steps:
    """What is known of a parameter."""
    with _lock:
        if _Latest.history is not None:
            _Latest.history.settle()
        return getattr(parameter, _KEY, None) or Steps()


def forget_steps(parameter: Parameter) -> None:
    """Know nothing of a parameter any more."""
    steps_of(parameter)
    vars(parameter).pop(_KEY, None)


class History:
    """The gradient computations of one function; what doesn't change from one to the next is only counted."""

    def __init__(self) -> None:
        self._parameters: tuple[weakref.ref[Parameter], ...] = ()
        self._ids: list[int] = []
        self._active: tuple[bool, ...] = ()
        self._pending = 0

    def note(self, parameters: tuple[Parameter, ...], active: tuple[bool, ...]) -> None:
        """One more computation, and for each of its parameters whether a gradient arrived at it."""
        with _lock:
            if _Latest.history is not self and _Latest.history is not None:
                _Latest.history.settle()  # the numbers are those of the net: functions take turns
            _Latest.history = self
            ids = list(map(id, parameters))
            if active != self._active or ids != self._ids:
                self.settle()
                self._parameters = tuple(map(weakref.ref, parameters))
                self._ids, self._active = ids, active
            self._pending += 1

    def settle(self) -> None:
        """Write down at the parameters what has been counted."""
        if not self._pending:
            return
        alive = [(p, active) for p, active in zip((known() for known in self._parameters), self._active)]
        steps = [(vars(p).setdefault(_KEY, Steps()), active) for p, active in alive if p is not None]
        start = 1 + max((step.latest for step, _ in steps), default=0)
        end = start + self._pending - 1
        for step, active in steps:
            step.latest = end
            if active:
                step.first, step.last = step.first or start, end
                step.reached += self._pending
        self._pending = 0


class _Latest:
    """The history that was noted in last."""

    history: History | None = None
