"""Cells: their classes, their statistics, and the parameters they hold in whatever attribute."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from mindspore import Parameter, ParameterTuple, nn


def subclass_unseen(base: type, namespace: dict[str, Any]) -> type:
    """Subclass a class without running its ``__init_subclass__`` or its metaclass's ``__new__``.

    Model registries hang on both, and must not see a class that the user never wrote. The subclass equals its base, so
    that ``type(layer) == nn.Dense``, ``type(layer) in (...)`` and dicts by class find what they look for.

    Raises:
        TypeError: The class can't be subclassed this way (its instances have another layout).
    """
    made: Any = type.__new__(_equal_to_base(type(base)), base.__name__, (nn.Cell,), namespace)
    made.__bases__ = (base,)
    return cast(type, made)


_metaclasses: dict[type, type] = {}


def _equal_to_base(metaclass: type) -> type:
    """A metaclass whose classes equal their bases."""
    if metaclass not in _metaclasses:

        def __eq__(cls: type, other: object) -> bool:
            return cls is other or getattr(other, "_lazycell_native", other) is cls._lazycell_native  # type: ignore

        def __hash__(cls: type) -> int:
            return hash(cls._lazycell_native)  # type: ignore[attr-defined]

        names = {"__eq__": __eq__, "__hash__": __hash__, "__module__": metaclass.__module__}
        _metaclasses[metaclass] = type(metaclass.__name__, (metaclass,), names)
    return _metaclasses[metaclass]


_STATISTICS = frozenset(("moving_mean", "moving_variance", "running_mean", "running_var"))
_ADD_FLAGS = "add_flags_recursive"  # how set_train() reaches a cell


def has_statistics(cell: nn.Cell) -> bool:
    """Whether a cell keeps moving statistics, as batch normalization does."""
    return not _STATISTICS.isdisjoint(cell._params) or not _STATISTICS.isdisjoint(cell._buffers)


def can_hold_statistics(cell: nn.Cell) -> bool:
    """Whether a cell leaves its statistics alone when it doesn't train; MindSpore's instance normalization doesn't."""
    return not (type(cell).__module__.startswith("mindspore.") and "InstanceNorm" in type(cell).__name__)


def _without_training(cell: nn.Cell, **flags: Any) -> nn.Cell:
    type(cell).add_flags_recursive(cell, **flags)
    if "training" in flags:
        vars(cell)["_lazycell_training"] = flags["training"]
        cell.add_flags(training=False)
    return cell


def statistics_are_still(cell: nn.Cell) -> bool:
    """Whether `hold_statistics` is in force."""
    return _ADD_FLAGS in vars(cell)


def hold_statistics(cell: nn.Cell) -> None:
    """Let a cell use its moving statistics, and leave them as they are, also after ``set_train(True)``."""
    if not statistics_are_still(cell):
        vars(cell)["_lazycell_training"] = cell.training
        cell.add_flags(training=False)
        vars(cell)[_ADD_FLAGS] = functools.partial(_without_training, cell)  # copies of the cell get one of their own
        if getattr(cell, "use_batch_statistics", None):
            vars(cell)["_lazycell_batch"] = True
            cell.use_batch_statistics = False


def release_statistics(cell: nn.Cell) -> None:
    """Undo `hold_statistics`: the cell trains if its net does."""
    if statistics_are_still(cell):
        del vars(cell)[_ADD_FLAGS]
        cell.add_flags(training=vars(cell).pop("_lazycell_training"))
        if vars(cell).pop("_lazycell_batch", False):
            cell.use_batch_statistics = True


@dataclass(frozen=True)
class Place:
    """Where a cell holds a parameter: in which attribute, and in a tuple or list at which position of how many."""

    attribute: str
    index: int | None = None
    length: int | None = None


def parameters_held(cell: nn.Cell) -> list[tuple[Parameter, Place]]:
    """The parameters that a cell and all below it hold, in whatever attribute, each with the first place found."""
    found: dict[int, tuple[Parameter, Place]] = {}

    def note(parameter: Parameter, place: Place) -> Parameter:
        if id(parameter) not in found or (place.index is not None and found[id(parameter)][1].index is None):
            found[id(parameter)] = parameter, place
        return parameter

    _map_parameters(cell, note)
    return list(found.values())


def replace_parameters(cell: nn.Cell, table: dict[int, Parameter]) -> None:
    """Let a cell and all below it hold other parameters; ``table`` gives them by the id of those to be replaced."""
    _map_parameters(cell, lambda parameter, place: table.get(id(parameter), parameter))


@functools.cache
def attributes_of_all() -> frozenset[str]:
    """The attributes that every cell has from the start, whatever its class."""
    return frozenset(vars(nn.Cell()))


_Replace = Callable[[Parameter, Place], Parameter]


def _map_parameters(cell: nn.Cell, replace: _Replace) -> None:
    for _, current in cell.cells_and_names():
        for name, parameter in list(current._params.items()):
            if parameter is not None:
                current._params[name] = replace(parameter, Place(name))
        for name, value in list(vars(current).items()):
            if name not in ("_params", "_cells"):
                vars(current)[name] = _mapped(value, replace, Place(name))


def _mapped(value: Any, replace: _Replace, place: Place) -> Any:
    if isinstance(value, Parameter):
        return replace(value, place)
    if isinstance(value, dict):
        value.update((key, _mapped(item, replace, Place(place.attribute))) for key, item in list(value.items()))
        return value
    if type(value) not in (list, tuple, ParameterTuple):
        return value
    places = (Place(place.attribute, index, len(value)) for index in range(len(value)))
    mapped = [_mapped(item, replace, inner) for item, inner in zip(value, places)]
    if type(value) is list:
        value[:] = mapped
        return value
    return value if all(map(operator.is_, mapped, value)) else type(value)(mapped)
