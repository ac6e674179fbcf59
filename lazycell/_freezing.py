"""Freeze and unfreeze: which parameters require a gradient, and which statistics move."""

from __future__ import annotations

import difflib
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

from mindspore import Parameter, Tensor, nn

from lazycell import _deferral
from lazycell import _mindspore as internals
from lazycell import _touching
from lazycell._errors import LazyCellError
from lazycell._registry import require_cell
from lazycell._touching import is_frozen, mark_frozen, own_children, own_parameters, subtree

_GRADIENT, _STATISTICS = "requires_grad.", "statistics."  # the keys of a freeze state start with one of these


class _Chosen:
    """What a call is about: parameters, each with whether it was named itself, and cells."""

    def __init__(self) -> None:
        self.parameters: dict[int, tuple[Parameter, bool]] = {}
        self.cells: dict[int, nn.Cell] = {}

    def add_parameter(self, parameter: Parameter, named: bool) -> None:
        if id(parameter) not in self.parameters or named:
            self.parameters[id(parameter)] = parameter, named

    def add_cells(self, cells: Iterable[nn.Cell]) -> None:
        for cell in cells:
            self.cells[id(cell)] = cell
            for parameter in own_parameters(cell) + _touching.hidden_parameters(cell):
                self.add_parameter(parameter, named=False)


def freeze(*targets: Any, before: nn.Cell | str | None = None, statistics: bool = False) -> int:
    """Let parameters require no gradient: they stay as they are, and gradients cost what the rest needs.

    Works on deferred parameters too, and takes effect at the next step in both modes. A frozen parameter leaves
    ``trainable_params()`` and every `LazyOptimizer`; `value_and_grad` refuses to be given it.

    Args:
        targets: Cells, which are frozen with all below them; parameters; lists of these; and names, where ``*`` stands
            for anything: ``freeze(net, "stem", "blocks.?.norm*", "*.bias")``. With names, a cell says where to look
            them up. A name is that of a layer or of a parameter, from that cell on.
        before: A cell, or its name: freeze what the given cells define before it. What it, or
            anything after it, holds as well stays as it is.
        statistics: Whether moving statistics of the layers are kept still as well: batch normalization then
            uses them, also after ``set_train(True)``. Otherwise they move as MindSpore moves them.

    Returns:
        The number of parameters that changed.

    Raises:
        TypeError: A target is none of these, or nothing was given.
        LazyCellError: A name matches nothing, there is no cell to look it up in, ``before`` isn't in the cells, or a
            layer's statistics can't be kept still. Nothing is changed then.

    Example:
        >>> import lazycell
        >>> from mindspore import nn
        >>> net = nn.SequentialCell(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Dense(8, 2))
        >>> lazycell.freeze(net, before=net[3], statistics=True)
        3
        >>> [p.name for p in net.trainable_params()]
        ['3.weight', '3.bias']
        >>> lazycell.unfreeze(net, "1.*")
        2
    """
    chosen = _choose("freeze", targets, before)
    moving = [cell for cell in chosen.cells.values() if internals.has_statistics(cell)]
    for cell in moving if statistics else ():
        if not internals.can_hold_statistics(cell):
            raise LazyCellError(
                f"{type(cell).__name__} moves its statistics whether it trains or not, so they can't be kept still: "
                "freeze it without statistics=True. Nothing was changed."
            )
    for parameter, _ in chosen.parameters.values():
        _deferral.check_spelling(parameter)
    if statistics:
        _hold(moving, True)
    return _change([(p, False) for p, _ in chosen.parameters.values()])


def unfreeze(*targets: Any, before: nn.Cell | str | None = None) -> int:
    """Undo `freeze`: parameters require a gradient again, and statistics move again.

    What its author made to require no gradient, such as moving statistics, stays so. A parameter that is given itself,
    or by its own name, is unfrozen in any case; so are those of a plain cell's copy only then.

    Args:
        targets: As for `freeze`.
        before: As for `freeze`.

    Returns:
        The number of parameters that changed.

    Raises:
        TypeError: As for `freeze`.
        LazyCellError: As for `freeze`.
    """
    chosen = _choose("unfreeze", targets, before)
    _hold(list(chosen.cells.values()), False)
    return _change([(p, True) for p, named in chosen.parameters.values() if named or is_frozen(p)])


def _change(wanted: list[tuple[Parameter, bool]]) -> int:
    """Let parameters require a gradient or not, and tell of those that change; how many these are."""
    changed = [(parameter, trainable) for parameter, trainable in wanted if parameter.requires_grad != trainable]
    for parameter, trainable in changed:
        parameter.requires_grad = trainable
        mark_frozen(parameter, not trainable)
    _touching.tell("parameters_frozen", [parameter for parameter, _ in changed])
    return len(changed)


def _hold(cells: list[nn.Cell], still: bool) -> None:
    """Keep statistics still, or let them move; graphs that hold them otherwise are compiled anew."""
    changed = [cell for cell in cells if internals.statistics_are_still(cell) != still]
    for cell in changed:
        (internals.hold_statistics if still else internals.release_statistics)(cell)
    if changed:
        internals.forget_graphs(changed)


# ---------------------------------------------------------------------------------------------
# What is meant


def _flat(targets: Iterable[Any]) -> Iterator[Any]:
    for target in targets:
        if isinstance(target, Iterable) and not isinstance(target, (str, bytes, dict, nn.Cell, Tensor)):
            yield from _flat(target)
        else:
            yield target


def _choose(function: str, given: tuple[Any, ...], before: nn.Cell | str | None) -> _Chosen:
    targets = list(_flat(given))
    cells = [target for target in targets if isinstance(target, nn.Cell)]
    names = [target for target in targets if isinstance(target, str)]
    for target in targets:
        if not isinstance(target, (nn.Cell, Parameter, str)):
            kind = type(target).__name__
            raise TypeError(f"{function}() takes cells, parameters, names, and lists of these, but got a {kind}.")
    if not given:
        raise TypeError(f"{function}() takes cells, parameters or names, but got nothing.")
    if (names or before is not None) and not cells:
        raise LazyCellError(f"{function}() got a name or before=, and no cell to look it up in: give the net as well.")
    chosen = _Chosen()
    if before is not None:
        _choose_before(chosen, function, cells, before)
    elif not names:
        chosen.add_cells(subtree(*cells))
    for name in names:
        _choose_named(chosen, function, cells, name)
    for target in targets:
        if isinstance(target, Parameter):
            chosen.add_parameter(target, named=True)
    return chosen


def _named(cell: nn.Cell) -> Iterator[tuple[str, nn.Cell]]:
    """A cell and all below it, by each of their names from that cell on."""
    stack = [("", cell)]
    while stack:
        name, current = stack.pop()
        yield name, current
        prefix = name + "." if name else ""
        stack.extend((prefix + key, child) for key, child in reversed(own_children(current)))


def _named_parameters(name: str, cell: nn.Cell) -> Iterator[tuple[str, Parameter]]:
    prefix = name + "." if name else ""
    return ((prefix + key, parameter) for key, parameter in OrderedDict.items(cell._params) if parameter is not None)


def _choose_named(chosen: _Chosen, function: str, cells: list[nn.Cell], pattern: str) -> None:
    found = False
    known = []
    for name, cell in (pair for root in cells for pair in _named(root)):
        if name and fnmatchcase(name, pattern):
            found = True
            chosen.add_cells(subtree(cell))
        known.append(name)
        for full, parameter in _named_parameters(name, cell):
            if fnmatchcase(full, pattern) or fnmatchcase(parameter.name, pattern):
                found = True
                chosen.add_parameter(parameter, named=full == pattern or parameter.name == pattern)
            known.append(full)
    if not found:
        close = difflib.get_close_matches(pattern, known, 3, 0.5) if pattern else []
        hint = f" Did you mean {' or '.join(map(repr, close))}?" if close else ""
        where = " and ".join(type(cell).__name__ for cell in cells)
        raise LazyCellError(f"{function}(): no layer and no parameter of {where} is named {pattern!r}.{hint}")


def _choose_before(chosen: _Chosen, function: str, cells: list[nn.Cell], before: nn.Cell | str) -> None:
    occurrences = [pair for root in cells for pair in _named(root)]  # a shared cell occurs more than once
    if not isinstance(before, str):
        require_cell(before)
    matching = [index for index, (name, cell) in enumerate(occurrences) if cell is before or name == before]
    if not matching:
        name = before if isinstance(before, str) else type(before).__name__
        where = " and ".join(type(cell).__name__ for cell in cells)
        raise LazyCellError(f"{function}(): before={name!r} isn't a layer of {where}, so nothing comes before it.")
    later = _Chosen()
    later.add_cells(cell for _, cell in occurrences[matching[0] :])
    chosen.add_cells(cell for _, cell in occurrences[: matching[0]] if id(cell) not in later.cells)
    for key in later.parameters.keys() & chosen.parameters.keys():
        del chosen.parameters[key]


# ---------------------------------------------------------------------------------------------
# State


def freeze_state(net: nn.Cell) -> dict[str, bool]:
    """What of a net is frozen, to be saved with its checkpoint.

    Args:
        net: Any cell.

    Returns:
        ``{"requires_grad.head.weight": True, ..., "statistics.norm": False, ...}``: for each parameter whether it
        requires a gradient, and for each layer with moving statistics whether they move. It goes into
        ``mindspore.save_checkpoint(net, path, append_dict=lazycell.freeze_state(net))``.

    Raises:
        TypeError: ``net`` is no cell.

    Example:
        >>> import lazycell
        >>> from mindspore import nn
        >>> net = nn.SequentialCell(nn.Dense(3, 2, has_bias=False), nn.Dense(2, 1, has_bias=False))
        >>> lazycell.freeze(net[0])
        1
        >>> lazycell.freeze_state(net)
        {'requires_grad.0.weight': False, 'requires_grad.1.weight': True}
    """
    parameters, moving = _by_name(net)
    state = {_GRADIENT + name: parameter.requires_grad for name, parameter in parameters.items()}
    for name, cell in moving.items():
        state[_STATISTICS + name] = not internals.statistics_are_still(cell)
    return state


def load_freeze_state(net: nn.Cell, state: dict[str, Any]) -> None:
    """Freeze a net as it was when `freeze_state` was asked.

    Args:
        net: A net of the same structure.
        state: What `freeze_state` returned, or a whole checkpoint that it was saved in, from
            ``mindspore.load_checkpoint(path)``.

    Raises:
        TypeError: ``net`` is no cell.
        LazyCellError: The state holds nothing of `freeze_state`, lacks a parameter of the net, or knows one that the
            net lacks. Nothing is changed then.
    """
    parameters, moving = _by_name(net)
    known = {_GRADIENT + name for name in parameters} | {_STATISTICS + name for name in moving}
    if not isinstance(state, Mapping):
        raise TypeError(f"load_freeze_state() takes a dict, but got a {type(state).__name__}.")
    given = {key: _as_bool(key, value) for key, value in state.items() if key.startswith((_GRADIENT, _STATISTICS))}
    if not given:
        raise LazyCellError(
            "the state holds no entry of lazycell.freeze_state(): save the checkpoint with "
            "append_dict=lazycell.freeze_state(net)."
        )
    differing = sorted(given.keys() ^ known)
    if differing:
        lacking = "the state" if differing[0] in known else type(net).__name__
        raise LazyCellError(
            f"the freeze state is that of another net: {lacking} lacks {differing[0]!r}, and {len(differing)} names "
            "differ in all. Nothing was changed."
        )
    for moves in (True, False):  # each looks through all graphs once
        _hold([cell for name, cell in moving.items() if given[_STATISTICS + name] is moves], not moves)
    _change([(parameter, given[_GRADIENT + name]) for name, parameter in parameters.items()])


def _as_bool(key: str, value: Any) -> bool:
    if isinstance(value, str):
        raise TypeError(f"the freeze state's entry {key!r} is the text {value!r}, not True or False.")
    return bool(value)


def _by_name(net: nn.Cell) -> tuple[dict[str, Parameter], dict[str, nn.Cell]]:
    """The parameters, and the layers with moving statistics, by the first name of each."""
    parameters: dict[str, Parameter] = {}
    moving: dict[str, nn.Cell] = {}
    seen: set[int] = set()
    for name, cell in _named(require_cell(net)):
        if id(cell) in seen:
            continue
        seen.add(id(cell))
        if internals.has_statistics(cell):
            moving[name] = cell
        for full, parameter in _named_parameters(name, cell):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                parameters[full] = parameter
    return parameters, moving
