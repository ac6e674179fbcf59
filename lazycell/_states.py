"""The state of an optimizer, by name: shared by all native optimizers, loaded and kept for parameters to come."""

from __future__ import annotations

import re
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

from mindspore import Parameter, Tensor, nn, ops

from lazycell import _deferral
from lazycell import _mindspore as internals
from lazycell._errors import LazyCellError

_FOREIGN = """\
{count} entries of the state that was loaded belong to nothing here, {first!r} first: the checkpoint is that of \
another optimizer or net. load_state_dict(state, strict=False) leaves them out."""

_SHAPE = "the state {name} has shape {given}, but {factory} needs {wanted}: it is that of another net."

_AMBIGUOUS = """\
{factory} has two states named {name}, which can't be told apart: give each a name of its own, as \
self.parameters.clone(prefix=...) does."""


class States:
    """The state parameters of an optimizer.

    Args:
        store: Where they are kept, by name.
        factory: The name of the optimizer's class.
        num_groups: The number of parameter groups, those included that are empty.
    """

    def __init__(self, store: dict[str, Parameter], factory: str, num_groups: int) -> None:
        self.store, self.num_groups = store, num_groups
        self._factory = factory
        self._used: set[str] = set()  # by a native optimizer
        self._owners: dict[str, weakref.ref[Parameter]] = {}  # the parameter that a state belongs to
        self._lenient = False
        self._files: list[_deferral.ValueStore] = []

    def put(self, state: Parameter) -> None:
        """Let a parameter be the state of its name."""
        self.store[state.name] = state
        self._used.add(state.name)

    def of(self, parameters: list[Parameter]) -> list[Parameter]:
        """The states that belong to some parameters, as their moments do."""
        owners = set(map(id, parameters))
        return [self.store[name] for name, owner in self._owners.items() if id(owner()) in owners]

    def share(
        self, native: nn.Cell, trained: list[Parameter], positions: list[int], known: Iterable[Parameter]
    ) -> None:
        """Let a new native optimizer use the state that there is, and take in what it brings.

        Args:
            native: The native optimizer.
            trained: The parameters that it updates.
            positions: Of its parameter groups among all groups.
            known: All parameters that may come to be updated.
        """
        ids = set(map(id, trained))
        fresh: dict[str, Parameter] = {}
        owners: dict[str, Parameter] = {}
        names: list[tuple[Parameter, str]] = []
        for state, place in internals.parameters_held(native):
            if id(state) in ids:
                continue
            name, owner = _name_and_owner(state, place, trained, positions)
            first = fresh.setdefault(name, state)
            if first is not state and not (name.startswith("learning_rate") and _are_equal(first, state)):
                raise LazyCellError(_AMBIGUOUS.format(factory=self._factory, name=name))  # MindSpore builds rates twice
            if owner is not None:
                owners[name] = owner
            names.append((state, name))
        self._refuse_unfit(fresh, known)
        chosen_by_name = {name: self._chosen(name, first, owners.get(name)) for name, first in fresh.items()}
        table = {id(state): chosen_by_name[name] for state, name in names}
        for state, name in names:
            chosen = table[id(state)]
            if name not in self._used and chosen.dtype != state.dtype:  # it was loaded
                chosen.set_dtype(state.dtype)
            if chosen is state:
                state.name = name
            self.store[name] = chosen
        self._used.update(fresh)
        self._owners.update((name, weakref.ref(owner)) for name, owner in owners.items())
        internals.replace_parameters(native, table)
        for state, _ in names:
            if table[id(state)] is not state and internals.can_be_deferred(state):
                _deferral.drop(state, self._file)  # MindSpore never lets go of the clones that optimizers make

    def share_common(self, native: nn.Cell, trained: list[Parameter]) -> None:
        """Take in the state of a native optimizer over stand-ins that belongs to no parameter: rates, counters."""
        used, owners = set(self._used), set(self._owners)
        self.share(native, trained, list(range(len(trained))), ())
        for name in set(self._owners) - owners:
            del self.store[name], self._owners[name]
        self._used = used  # the first real one takes it over, as if it had been loaded

    def _chosen(self, name: str, fresh: Parameter, owner: Parameter | None) -> Parameter:
        """The state of a name, unless it is that of a parameter that another has taken the place of."""
        before = self._owners.get(name)
        if before is not None and owner is not None and before() is not owner:
            return fresh
        return self.store.get(name, fresh)

    def _file(self) -> _deferral.ValueStore:
        if not self._files:
            self._files.append(_deferral.ValueStore())
        return self._files[0]

    def _refuse_unfit(self, fresh: dict[str, Parameter], known: Iterable[Parameter]) -> None:
        """Refuse what was loaded, if it doesn't fit what there is."""
        for name, state in fresh.items():
            existing = self.store.get(name)
            if existing is not None and name not in self._used and existing.shape != state.shape:
                shapes = {"given": tuple(existing.shape), "wanted": tuple(state.shape)}
                raise LazyCellError(_SHAPE.format(name=name, factory=self._factory, **shapes))
        if not self._used:
            waiting = [name for name in self.store if name not in fresh]
            foreign = self._foreign(waiting, fresh, known)
            if foreign and not self._lenient:
                raise LazyCellError(_FOREIGN.format(count=len(foreign), first=foreign[0]))
            for name in foreign:
                del self.store[name]

    def _foreign(self, names: list[str], used: Iterable[str], known: Iterable[Parameter]) -> list[str]:
        """Which names can't be those of any state here."""
        suffixes = _suffixes(known)
        kinds = {_kind(name, suffixes) for name in used} - {None}
        loaded = {_kind(name, suffixes) for name in names} - {None}
        if loaded and not loaded & kinds:  # of another class altogether
            suffixes = ()
        groups = {f"learning_rate_group_{index}" for index in range(self.num_groups)} | {"learning_rate"}
        return [name for name in names if name not in groups and _kind(name, suffixes) is None]

    def load(self, state: Mapping[str, Any], strict: bool, known: list[Parameter]) -> None:
        """Take over values by name; what belongs to parameters that nobody has touched is kept for them."""
        own = {parameter.name for parameter in known}
        entries = {name: value for name, value in state.items() if name not in own}
        if self._used:
            unknown = [name for name in entries if name not in self._used]
            foreign = set(self._foreign(unknown, self._used, known))
            if foreign and strict:
                first = next(name for name in unknown if name in foreign)
                raise LazyCellError(_FOREIGN.format(count=len(foreign), first=first) + " Nothing was changed.")
            entries = {name: value for name, value in entries.items() if name not in foreign}
        for name, value in entries.items():
            if name in self._used and tuple(self.store[name].shape) != tuple(value.shape):
                shapes = {"given": tuple(value.shape), "wanted": tuple(self.store[name].shape)}
                raise LazyCellError(_SHAPE.format(name=name, factory=self._factory, **shapes) + " Nothing was changed.")
        self._lenient = not strict
        for name, value in entries.items():
            copied = internals.snapshot(value) if isinstance(value, Tensor) else Tensor(value)
            if name in self._used:
                ops.assign(self.store[name], copied.astype(self.store[name].dtype))  # graphs notice nothing else
            else:
                self.store[name] = Parameter(copied, name=name, requires_grad=False)


def _suffixes(parameters: Iterable[Parameter]) -> tuple[str, ...]:
    return tuple(joint + parameter.name for parameter in parameters for joint in (".", "_"))


def _kind(name: str, suffixes: tuple[str, ...]) -> str | None:
    """What stands before a parameter's name in that of a state, as ``"moment1"``; None if it is no parameter's."""
    fitting = [suffix for suffix in suffixes if name.endswith(suffix)]
    return name[: -len(max(fitting, key=len))] if fitting else None


def _name_and_owner(
    state: Parameter, place: internals.Place, trained: list[Parameter], positions: list[int]
) -> tuple[str, Parameter | None]:
    """A name that a state has in every native optimizer, and the parameter that it belongs to."""
    fitting = [parameter for parameter in trained if state.name.endswith(("." + parameter.name, "_" + parameter.name))]
    if fitting:
        return state.name, max(fitting, key=lambda parameter: len(parameter.name))
    if place.index is not None and place.length == len(trained) and state.shape == trained[place.index].shape:
        owner = trained[place.index]
        return f"{place.attribute}.{owner.name}", owner
    found = re.fullmatch(r"learning_rate_group_(\d+)", state.name)
    if found is not None and int(found[1]) < len(positions):
        return f"learning_rate_group_{positions[int(found[1])]}", None
    if re.fullmatch(r"Parameter(#\d+)?", state.name):  # it was given none
        return place.attribute if place.index is None else f"{place.attribute}.{place.index}", None
    return state.name, None


def _are_equal(one: Parameter, other: Parameter) -> bool:
    return one.shape == other.shape and bool((one.asnumpy() == other.asnumpy()).all())
