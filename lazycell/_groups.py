"""The parameter groups of an optimizer: who belongs to them, now and later."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from mindspore import Parameter, nn

from lazycell import _deferral
from lazycell._errors import LazyCellError
from lazycell._live import TouchedParameters
from lazycell._unsized import is_unsized


class Group:
    """One parameter group: where its members come from, which of them count, and its options."""

    def __init__(self, members: Any, options: dict[str, Any]) -> None:
        self.options = options
        self.source: TouchedParameters | list[Parameter] | None = None
        self.accepts: Callable[[Parameter], bool] | None = None
        if isinstance(members, tuple) and len(members) == 2 and _is_predicate(members[1]):
            members, self.accepts = members
        if _is_predicate(members):
            self.accepts = members
        else:
            self.source = _source(members)
        self._answers: dict[int, tuple[Parameter, bool]] = {}

    def takes(self, parameter: Parameter) -> bool:
        """What its predicate says of a parameter; it is asked once, since who belongs where must not change."""
        if self.accepts is None:
            return True
        if id(parameter) not in self._answers:
            if is_unsized(parameter):
                return False  # until it has a shape, which the predicate may want to know
            self._answers[id(parameter)] = parameter, bool(self.accepts(parameter))
        return self._answers[id(parameter)][1]

    def candidates(self) -> list[tuple[Parameter, bool]]:
        """What its source may come to hold, each with whether its use can be tracked."""
        if isinstance(self.source, TouchedParameters):
            return list(self.source._candidates())
        return [(parameter, _deferral.is_deferred(parameter)) for parameter in self.source or ()]


def _is_source(value: Any) -> bool:
    return isinstance(value, (TouchedParameters, nn.Cell, Parameter))


def _is_predicate(value: Any) -> bool:
    return callable(value) and not _is_source(value)


def _source(members: Any) -> TouchedParameters | list[Parameter]:
    if isinstance(members, nn.Cell):
        return TouchedParameters(members)
    if isinstance(members, TouchedParameters):
        return members
    if isinstance(members, Parameter):
        return [members]
    found = list(members) if isinstance(members, Iterable) else [members]
    for member in found:
        if not isinstance(member, Parameter):
            raise TypeError(
                "LazyOptimizer takes a live list, a cell, parameters, or groups (dicts) whose params are one of "
                f"these, a predicate, or a pair (live list, predicate); but got {type(member).__name__}."
            )
    return found


class Groups:
    """The parameter groups of an optimizer, as they were given."""

    def __init__(self, params: Any) -> None:
        entries = list(params) if isinstance(params, Iterable) and not _is_source(params) else [params]
        if not entries:
            raise LazyCellError("LazyOptimizer got an empty list: there are no parameters to update.")
        self.named = any(isinstance(entry, dict) for entry in entries)
        self.groups: list[Group] = []
        self.order: Group | None = None
        whole = params if _is_source(params) else entries
        self.add(entries if self.named else [{"params": whole}])

    def add(self, entries: list[Any]) -> None:
        """Add groups."""
        for entry in entries:
            self._add(entry)
        if any(group.source is None for group in self.groups) and not self.sources():
            raise LazyCellError(
                "a parameter group was given as a predicate, and no other group says over which parameters: give it as "
                "a pair (live list, predicate)."
            )

    def _add(self, entry: Any) -> None:
        if not isinstance(entry, dict) or not {"params", "order_params"} & entry.keys():
            raise TypeError(f"a parameter group is a dict with an entry 'params', but got {entry!r:.100}.")
        if "order_params" in entry:
            self.order = Group(entry["order_params"], {})
        else:
            self.groups.append(Group(entry["params"], {key: entry[key] for key in entry if key != "params"}))

    def sources(self) -> list[Group]:
        """All that parameters come from."""
        return [group for group in (*self.groups, self.order) if group is not None and group.source is not None]

    def lists(self) -> list[TouchedParameters]:
        """The live lists among these."""
        return [group.source for group in self.sources() if isinstance(group.source, TouchedParameters)]

    def members(self) -> list[list[tuple[Parameter, bool]]]:
        """For each group what it may come to hold.

        Raises:
            LazyCellError: Two groups claim one parameter.
        """
        listed = [group.candidates() for group in self.groups]
        everything = {id(p): (p, t) for group in self.sources() for p, t in group.candidates()}
        owner: dict[int, int] = {}
        for index, group in enumerate(self.groups):  # those who choose come first; lists get what is left
            if group.source is None:
                listed[index] = [(p, t) for p, t in everything.values() if id(p) not in owner and group.takes(p)]
                owner.update((id(p), index) for p, _ in listed[index])
        for index, group in enumerate(self.groups):
            if group.source is not None:
                rest = [(p, t) for p, t in listed[index] if group.takes(p)]
                listed[index] = []
                for p, t in rest:
                    other = owner.setdefault(id(p), index)
                    if other != index and self.groups[other].source is not None:
                        raise LazyCellError(f"{p.name} is in two parameter groups, {other} and {index}.")
                    if other == index:
                        listed[index].append((p, t))
        return listed


class OptimizerParameters(TouchedParameters):
    """The touched parameters of an optimizer that require a gradient, group by group: a live list."""

    def __init__(self, groups: Groups, factory: str) -> None:
        list.__init__(self)
        self._begin()
        self._groups, self._factory = groups, factory
        self._fixed: dict[int, Parameter] | None = None
        self._watch()

    def fix(self) -> None:
        """Let nothing join that doesn't require a gradient now: a list that was copied now would not hold it."""
        self._fixed = {id(parameter): parameter for parameter in self._all if parameter.requires_grad}
        self._look()

    def _candidates(self) -> Iterator[tuple[Parameter, bool]]:
        members = {id(p): (p, t) for group in self._groups.members() for p, t in group}
        if self._groups.order is not None:
            first = [id(p) for p, _ in self._groups.order.candidates() if id(p) in members]
            members = {key: members[key] for key in (*first, *members)}
        self._unsized = [p for p, _ in members.values() if is_unsized(p)]
        return iter([pair for key, pair in members.items() if self._fixed is None or key in self._fixed])

    def has_completed(self) -> bool:
        return any(source.has_completed() for source in self._groups.lists()) or bool(self._counted)

    def _changes_unseen(self) -> bool:
        lists = self._groups.lists()
        return any(source._changes_unseen() for source in lists) or not all(map(is_unsized, self._unsized))

    def _name(self) -> str:
        return f"LazyOptimizer({self._factory})"
