"""Live lists of touched parameters."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterator
from typing import Any

from mindspore import Parameter, nn

from lazycell import _deferral
from lazycell import _mindspore as internals
from lazycell import _reading, _touching
from lazycell._errors import UntouchedError, UntouchedWarning, warn
from lazycell._registry import require_tracked
from lazycell._touching import Observer, Structure, is_touched, own_parameters, state_of

_UNTOUCHED = """\
the touched parameters of {name} were listed before any forward pass of it had completed, so the list is empty \
or incomplete. Call the net or a gradient function over it once, or lazycell.dry_run(net, inputs), before \
you build an optimizer or a graph from the list; or build the optimizer as lazycell.LazyOptimizer(nn.Adam, net), which \
waits for the first forward pass; or call lazycell.patch() before, under which all optimizers wait. To count \
parameters, use get_parameters(), which lists all of them; to freeze them, lazycell.freeze()."""

_BUILT_IN = """\
a function was compiled with the touched parameters of {name} before anything had touched one, so it computes \
gradients of nothing. Call the net, or lazycell.dry_run(net, inputs), and then the function again."""


class Unused:
    """Whether a live list shows all that it may come to hold, as long as nothing of it has been used.

    Only under the patch: scripts that know nothing of live lists filter, add and freeze what they list first.
    """

    shown = False


class TouchedParameters(list[Parameter], Observer):
    """The touched parameters of a cell that require a gradient: a live list.

    It is empty before the first forward pass, and filled in place when parameters are touched, in the order in
    which plain ``nn.Cell.trainable_params()`` gives them. Slices and copies are ordinary lists.

    Under `patch` it lists all parameters until one of them is touched. They have no storage then, and an optimizer
    built from a part of them waits, as one built from the list itself does.
    """

    __module__ = "lazycell"
    __hash__ = object.__hash__  # type: ignore[assignment]  # to be held weakly; lists aren't hashable otherwise

    def __init__(self, cell: nn.Cell, recurse: bool = True) -> None:
        super().__init__()
        self._counted: list[Parameter] = []  # what is touched; the list itself may show more
        self._cell = cell
        self._recurse = recurse
        self._watch()

    def _watch(self) -> None:
        """Fill the list, and keep it filled from now on."""
        self._graphs: list[internals.Forget] = []  # compiled with the list as it is
        self._look()
        _touching.observers.add(self)  # weakly: a list that is dropped is forgotten

    def _candidates(self) -> Iterator[tuple[Parameter, bool]]:
        """All parameters that may come to be listed, in order, each with whether its use can be tracked."""
        return _parameters(self._cell, self._recurse)

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
        self._flags = internals.trainable_flags(self._all)
        counted = [p for p, tracked in self._known if (is_touched(p) or not tracked) and p.requires_grad]
        self._ranks = [self._rank[id(parameter)] for parameter in counted]
        if list(map(id, counted)) != list(map(id, self._counted)):
            self._leave_graphs()
        self._counted = counted
        self._shows_all = Unused.shown and not any(map(is_touched, self._all))
        self[:] = [p for p in self._all if p.requires_grad] if self._shows_all else counted

    def counted(self) -> list[Parameter]:
        """What is touched and requires a gradient, whatever the list shows."""
        return self._counted[:]

    def refresh(self) -> None:
        """Make the list what it would be if it were made now."""
        with _touching.lock:
            if self._version != Structure.version or self._changes_unseen():
                self._look()
            elif self._flags != internals.trainable_flags(self._all):
                self._fill()

    def parameter_touched(self, parameter: Parameter) -> None:
        """Take a parameter in at its place; called at its first touch."""
        if self._version != Structure.version:
            self._look()
            return
        rank = self._rank.get(id(parameter))
        if rank is not None and parameter.requires_grad:
            place = bisect(self._ranks, rank)
            if not place or self._ranks[place - 1] != rank:
                self._ranks.insert(place, rank)
                self._counted.insert(place, parameter)
                if self._shows_all:
                    self._shows_all = False
                    self[:] = self._counted
                else:
                    self.insert(place, parameter)
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
        return super().__len__()

    def __iter__(self) -> Iterator[Parameter]:
        if not self.has_completed():
            if Unused.shown:
                self.refresh()
                return iter([parameter for parameter in self._all if parameter.requires_grad])
            name = self._name()
            if internals.in_graph_mode():
                raise UntouchedError(_UNTOUCHED.format(name=name))
            warn(UntouchedWarning(_UNTOUCHED.format(name=name)))
        self.refresh()
        return iter(self[:])

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
        if self._shows_all:  # the graph would come to hold all
            self._shows_all = False
            self[:] = self._counted
        self._built_in = self.counted()
        _reading.note_in_compilation(self)

    def graph_finished(self, forget: internals.Forget) -> None:
        """Have a graph compiled again that was built with another list than this is now."""
        used = (is_touched(p) or not tracked for p, tracked in self._known)
        if not any(used):  # gradients of nothing leave a graph of nothing
            raise UntouchedError(_BUILT_IN.format(name=self._name()))
        if list(map(id, self._built_in)) != list(map(id, self._counted)):
            raise internals.StaleGraph
        self._graphs.append(forget)

    def _leave_graphs(self) -> None:
        """Have the graphs that hold the list as it was compiled anew at their next call."""
        while self._graphs:
            self._graphs.pop()()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return list, (self[:],)


def _parameters(cell: nn.Cell, recurse: bool) -> Iterator[tuple[Parameter, bool]]:
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
