"""Which gradient computations each parameter took part in; for reports."""

from __future__ import annotations

import threading
import weakref

from mindspore import Parameter

from lazycell._touching import now, touch_order

_KEY = "_lazycell_steps"
_lock = threading.RLock()


class Steps:
    """The gradient computations that asked for a parameter's gradient, numbered from 1.

    Attributes:
        asked: How many there were.
        unwatched: In how many of them nobody looked whether a gradient arrived at it.
        reached: In how many one was seen to arrive.
        first, last: The first and the last one of these; 0 if there is none.
    """

    def __init__(self) -> None:
        self.asked = self.unwatched = self.reached = self.first = self.last = 0

    def add(self, count: int, active: bool | None) -> None:
        """Some more computations that were alike; ``active`` is None if nobody looked."""
        start = self.asked + 1
        self.asked += count
        if active is None:
            self.unwatched += count
        elif active:
            self.first, self.last = self.first or start, self.asked
            self.reached += count

    def put_before(self, count: int) -> None:
        """Some computations that came before all that are known, and didn't reach it."""
        self.asked += count
        if self.reached:
            self.first, self.last = self.first + count, self.last + count


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
        self._active: tuple[bool, ...] | None = ()
        self._pending = 0
        self._total = 0
        self._noted_at = 0  # in the order of touches
        self._met: dict[int, weakref.ref[Parameter]] = {}

    def note(self, parameters: tuple[Parameter, ...], active: tuple[bool, ...] | None) -> None:
        """One more computation.

        Args:
            parameters: Those whose gradients were asked for.
            active: For each, whether a gradient arrived at it; None if nobody looked.
        """
        with _lock:
            if _Latest.history is not self and _Latest.history is not None:
                _Latest.history.settle()  # functions take turns, and the numbers are the parameters'
            _Latest.history = self
            ids = list(map(id, parameters))
            if active != self._active or ids != self._ids:
                self.settle()
                if ids != self._ids:
                    self._meet(parameters)
                self._parameters = tuple(map(weakref.ref, parameters))
                self._ids, self._active = ids, active
            self._pending += 1
            self._total += 1
            self._noted_at = now()

    def _meet(self, parameters: tuple[Parameter, ...]) -> None:
        """What was touched since the last computation wasn't there to be asked for before: those didn't reach it."""
        self._met = {key: known for key, known in self._met.items() if known() is not None}
        for parameter in parameters:
            if id(parameter) in self._met:
                continue
            self._met[id(parameter)] = weakref.ref(parameter)
            if self._total and (touch_order(parameter) or 0) > self._noted_at:
                _known_steps(parameter).put_before(self._total)

    def settle(self) -> None:
        """Write down at the parameters what has been counted."""
        if not self._pending:
            return
        actives = (None,) * len(self._parameters) if self._active is None else self._active
        for known, active in zip(self._parameters, actives):
            parameter = known()
            if parameter is not None:
                _known_steps(parameter).add(self._pending, active)
        self._pending = 0


def _known_steps(parameter: Parameter) -> Steps:
    steps: Steps = vars(parameter).setdefault(_KEY, Steps())
    return steps


class _Latest:
    """The history that was noted in last."""

    history: History | None = None
