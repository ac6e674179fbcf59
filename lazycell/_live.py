"""Live lists of touched parameters."""

from __future__ import annotations

import sys
from bisect import bisect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mindspore import Parameter, ParameterTuple, nn

from lazycell import _deferral
from lazycell import _mindspore as internals
from lazycell import _reading, _touching
from lazycell._errors import UntouchedError, UntouchedWarning, warn
from lazycell._listed import (
    EditedParameters,
    Listed,
    NoticingList,
    Patched,
    are_listed,
    gone_through_with,
    is_listed,
    leave_out,
    list_for_good,
    nobody_looks,
)
from lazycell._registry import require_tracked
from lazycell._touching import Observer, Structure, are_touched, are_used, own_parameters, state_of

_UNTOUCHED = """\
the touched parameters of {name} were listed before any forward pass of it had completed, so the list is empty \
or incomplete. Call the net or a gradient function over it once, or lazycell.dry_run(net, inputs), before \
you build an optimizer or a graph from the list; or build the optimizer as lazycell.LazyOptimizer(nn.Adam, net), which \
waits for the first forward pass; or call lazycell.patch() before, under which all optimizers wait. To count \
parameters, use get_parameters(), which lists all of them; to freeze them, lazycell.freeze()."""

_BUILT_IN = """\
a function was compiled with the touched parameters of {name} before anything had touched one, so it computes \
gradients of nothing. Call the net, or lazycell.dry_run(net, inputs), and then the function again."""


class TouchedParameters(NoticingList, Observer):
    """The touched parameters of a cell that require a gradient: a live list.

    It is empty before the first forward pass, and filled in place when parameters are touched, in the order in
    which plain ``nn.Cell.trainable_params()`` gives them. Slices and copies are ordinary lists.

    Under `patch` it lists all parameters until one of them is touched, and goes on to do so if somebody has looked at
    it: what a script has filtered, copied or counted must not change. An optimizer holds the touched ones in any case.
    Edited, it is an ordinary list from then on.
    """

    __module__ = "lazycell"

    def __init__(self, cell: nn.Cell, recurse: bool = True) -> None:
        super().__init__()
        self._begin()
        self._cell = cell
        self._recurse = recurse
        self._watch()

    def _begin(self) -> None:
        self._counted: list[Parameter] = []  # what is touched; the list itself may show more
        self._only_counted = False

    def _watch(self) -> None:
        """Fill the list, and keep it filled from now on."""
        self._graphs: list[internals.Forget] = []  # compiled with the list as it is
        self._look()
        _touching.observers.add(self)  # weakly: a list that is dropped is forgotten

    def _candidates(self) -> Iterator[tuple[Parameter, bool]]:
        """All parameters that may come to be listed, in order, each with whether its use can be tracked."""
        return parameters_in_order(self._cell, self._recurse)

    def _look(self) -> None:
        """Look at the tree as it stands now."""
        self._version = Structure.version
        self._known = list(self._candidates())  # held, so that no id comes to mean another
        self._all = [parameter for parameter, _ in self._known]
        self._rank = {id(parameter): rank for rank, (parameter, _) in enumerate(self._known)}
        for parameter, _ in self._known:
            _deferral.check_spelling(parameter)
        self._fill()

    def _fill(self) -> None:
        """List what counts by now; freezing and unfreezing shows here."""
        used = [rank for rank, is_used in enumerate(are_used(self._known)) if is_used]
        self._used = [self._all[rank] for rank in used]
        trained = internals.trainable_flags(self._all)
        self._flags = trained if self._looked_after() is self._all else [trained[rank] for rank in used]
        self._ranks = [rank for rank in used if trained[rank]]
        counted = [self._all[rank] for rank in self._ranks]
        if list(map(id, counted)) != list(map(id, self._counted)):
            self._leave_graphs()
        self._counted = counted
        self._show()

    def _looked_after(self) -> list[Parameter]:
        """Those that the list changes with, if they are frozen or unfrozen; where nothing else is shown, the used."""
        return self._all if Patched.active or Listed.ever else self._used

    def _show(self) -> None:
        """List what is touched, and what has been listed for good; all, under the patch, before anything is touched."""
        self._is_open = Patched.active and not any(are_touched(self._all))
        if self._only_counted or not (self._is_open or Listed.ever):
            self.set_raw(self._counted)
            return
        ids = set(map(id, self._counted))
        known = zip(self._all, internals.trainable_flags(self._all), are_listed(self._all))
        self.set_raw([p for p, trains, listed in known if id(p) in ids or (trains and (self._is_open or listed))])

    def everything(self) -> list[Parameter]:
        """All parameters that may come to be listed, in order."""
        self.refresh()
        return self._all[:]

    def counted(self) -> list[Parameter]:
        """What is touched and requires a gradient, whatever the list shows."""
        return self._counted[:]

    @contextmanager
    def without_unused(self) -> Iterator[None]:
        """Show what is touched alone, for what is compiled inside."""
        self._only_counted = True
        self._show()
        try:
            yield
        finally:
            self._only_counted = False
            self._show()

    def shown(self) -> list[Parameter]:
        """What gradients are given for: what is touched, and what has been listed for good, with zeros."""
        if self._is_open:
            return self.counted()
        return self.raw()

    def refresh(self) -> None:
        """Make the list what it would be if it were made now."""
        with _touching.lock:
            if self._version != Structure.version or self._changes_unseen():
                self._look()
            elif self._flags != internals.trainable_flags(self._looked_after()):
                self._fill()

    def parameter_touched(self, parameter: Parameter) -> None:
        """Take a parameter in at its place; called at its first touch."""
        if self._version != Structure.version:
            self._look()
            return
        rank = self._rank.get(id(parameter))
        if rank is None:
            return
        # It may turn out to be frozen, and count when it isn't any more; and MindSpore raises errors of operators that
        # failed before at any later point, this one too. Until it is taken in, the list is to be made anew.
        flags, self._flags = self._flags, []
        if not parameter.requires_grad:
            return
        if not (Patched.active or Listed.ever):
            flags.append(True)
        self._used.append(parameter)
        self._flags = flags
        place = bisect(self._ranks, rank)
        if not place or self._ranks[place - 1] != rank:
            shows_more = self._is_open or self.shows_unused()
            self._ranks.insert(place, rank)
            self._counted.insert(place, parameter)
            if not shows_more:
                list.insert(self, place, parameter)
            elif self._is_open or not is_listed(parameter):
                self._show()
            self._leave_graphs()

    def touches_forgotten(self, cell: nn.Cell) -> None:
        """Count anew; called when the touches below a cell were reset."""
        with _touching.lock:
            self._look()

    def parameters_frozen(self, parameters: list[Parameter]) -> None:
        """Count anew; called when parameters were frozen or unfrozen."""
        self.refresh()

    def __len__(self) -> int:
        if self._version != Structure.version:
            self.refresh()
        self.looked_at()
        return super().__len__()

    def __iter__(self) -> Iterator[Parameter]:
        if not self.has_completed() and not Patched.active:
            name = self._name()
            if internals.in_graph_mode():
                raise UntouchedError(_UNTOUCHED.format(name=name))
            warn(UntouchedWarning(_UNTOUCHED.format(name=name)))
        self.refresh()
        if not Patched.active or nobody_looks():
            return iter(self.raw())
        self.looked_at()
        others = gone_through_with(self, sys._getframe(1))
        together = [other for other in others if isinstance(other, TouchedParameters)]
        if len(together) > 1 and any(other.shows_unused() for other in together):
            for other in together:
                other.list_all()
        return self._later()

    def _later(self) -> Iterator[Parameter]:
        """What is shown when the first is taken out."""
        yield from self.raw()

    def shows_unused(self) -> bool:
        """Whether it shows more than what is touched."""
        return len(self.raw()) > len(self._counted)

    def list_all(self) -> None:
        """Show all parameters from now on, and let all lists do so."""
        self.refresh()
        list_for_good([parameter for parameter in self._all if parameter.requires_grad])
        self._fill()

    def looked_at(self) -> None:
        """Under the patch: keep showing what has been seen."""
        if not Patched.active or nobody_looks():
            return
        if not self.has_completed():
            self.list_all()
        else:
            seen = set(map(id, self.raw()))
            leave_out([p for p in self._all if p.requires_grad and id(p) not in seen])

    def about_to_be_edited(self) -> None:
        """Become an ordinary list."""
        self.refresh()
        self.looked_at()
        _touching.observers.discard(self)
        self.__class__ = EditedParameters  # type: ignore[assignment]

    def clone(self, prefix: str, init: Any = "same") -> ParameterTuple:
        """Copies of what is listed, as ``ParameterTuple.clone`` makes them."""
        return ParameterTuple(self).clone(prefix, init)

    def has_completed(self) -> bool:
        """Whether it is known what is used: a forward pass has completed, of the cell or of something in it.

        Of cells that aren't tracked, all counts as used.
        """
        return _has_completed(self._cell) or not any(tracked for _, tracked in self._known)

    def _changes_unseen(self) -> bool:
        """Whether the tree may have changed without `Structure` telling: only tracked cells tell."""
        return state_of(self._cell) is None

    def _name(self) -> str:
        return type(self._cell).__name__

    # In graphs

    @property
    def __parameter_tuple__(self) -> None:
        """What MindSpore's compiler asks of a list that it is about to build into a graph."""
        self.note_built_in()
        raise AttributeError("__parameter_tuple__")

    def note_built_in(self) -> None:
        """Note that what is being compiled comes to hold the list as it is now."""
        self.refresh()
        if Patched.active and not self._counted:  # nobody knows yet, and a graph of nothing can't be compiled
            touch_all(self)
        elif self._is_open:
            self.set_raw(self._counted)
        self._built_in = self.raw()
        _reading.note_in_compilation(self)

    def graph_finished(self, forget: internals.Forget) -> None:
        """Have a graph compiled again that was built with another list than this is now."""
        if not any(are_used(self._known)):  # gradients of nothing leave a graph of nothing
            raise UntouchedError(_BUILT_IN.format(name=self._name()))
        if list(map(id, self._built_in)) != list(map(id, self.raw())):
            raise internals.StaleGraph
        self._graphs.append(forget)

    def _leave_graphs(self) -> None:
        """Have the graphs that hold the list as it was compiled anew at their next call."""
        while self._graphs:
            self._graphs.pop()()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return list, (self.raw(),)


def touch_all(parameters: TouchedParameters) -> None:
    """Count all parameters that a list may come to hold as used, where it can't be known in time which are."""
    parameters.list_all()
    for parameter in parameters._all:
        if parameter.requires_grad:
            _touching.touch(parameter)


def parameters_in_order(cell: nn.Cell, recurse: bool = True) -> Iterator[tuple[Parameter, bool]]:
    """MindSpore's own listing of parameters, each with whether its use can be tracked."""
    seen: set[int] = set()
    for current in _touching.subtree(cell) if recurse else (cell,):
        tracked = state_of(current) is not None
        for parameter in own_parameters(current):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield parameter, tracked


def _has_completed(cell: nn.Cell) -> bool:
    """Whether a cell's use is known: it has completed a forward pass, or something below it has."""
    state = state_of(cell)
    if state is not None and state.called:
        return state.completed
    return any(below is not None and below.completed for below in map(state_of, _touching.subtree(cell)))


def trainable_params(cell: nn.Cell, recurse: bool = True) -> TouchedParameters:
    """The touched parameters of a cell that require a gradient, as a live list.

    Args:
        cell: A `LazyCell`, or any cell that holds tracked ones. Parameters of cells that aren't tracked count as
            touched.
        recurse: Whether to include the parameters of all cells below it.

    Returns:
        A `TouchedParameters`: a new list object with each call.

    Raises:
        TypeError: ``cell`` is no cell.
        LazyCellError: Nothing in it is tracked.

    Example:
        >>> import lazycell, mindspore as ms
        >>> from mindspore import nn
        >>> net = lazycell.track(nn.SequentialCell(nn.Dense(3, 2), nn.ReLU()))
        >>> params = lazycell.trainable_params(net)
        >>> len(params)
        0
        >>> y = net(ms.ops.ones((1, 3)))
        >>> [p.name for p in params]
        ['0.weight', '0.bias']
    """
    return TouchedParameters(require_tracked(cell), recurse)
