"""Lists that notice who looks at them and who edits them.

Under the patch, scripts that know nothing of live lists filter, copy, count and pair what they list, and may do so
before it is known what is used. What they have seen once must not change under their hands.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from mindspore import Parameter

from lazycell import _mindspore as internals
from lazycell._errors import user_location

_LOOKS = ("__contains__", "__eq__", "__getitem__", "__mul__", "__ne__", "__rmul__", "copy", "count", "index")
_EDITS = (
    "__delitem__", "__iadd__", "__imul__", "__setitem__", "append", "clear", "extend", "insert", "pop", "remove",
    "reverse", "sort",
)  # fmt: skip


class Patched:
    """Whether `patch` is in force."""

    active = False


class Listed:
    """Whether `list_for_good` was ever called, so that those who never patch need not look."""

    ever = False


def list_for_good(parameters: list[Parameter]) -> None:
    """A script has seen these parameters listed, used or not: lists go on showing them."""
    Listed.ever = True
    for parameter in parameters:
        parameter._lazycell_listed = True


def is_listed(parameter: Parameter) -> bool:
    """Whether `list_for_good` was called."""
    return getattr(parameter, "_lazycell_listed", False)


def are_listed(parameters: list[Parameter]) -> list[bool]:
    """The same for many; asked at each step in Graph mode, also of deferred ones, whose attributes come slowly."""
    get = object.__getattribute__
    return ["_lazycell_listed" in get(parameter, "__dict__") for parameter in parameters]


def leave_out(parameters: list[Parameter]) -> None:
    """A script has seen a list without these parameters, because they aren't used so far."""
    for parameter in parameters:
        if left_out_at(parameter) is None:
            parameter._lazycell_left_out = user_location() or "?"


def left_out_at(parameter: Parameter) -> str | None:
    """The line at which a script saw a list without a parameter, if one did."""
    return getattr(parameter, "_lazycell_left_out", None)


class NoticingList(list[Parameter]):
    """A list that tells itself when it is looked at, and before it is edited."""

    __hash__ = object.__hash__  # type: ignore[assignment]  # to be held weakly; lists aren't hashable otherwise

    def looked_at(self) -> None:
        """Someone is about to see what is listed."""

    def about_to_be_edited(self) -> None:
        """Someone is about to change what is listed."""

    def raw(self) -> list[Parameter]:
        """What is listed, without anybody's noticing."""
        return list.__getitem__(self, slice(None))

    def set_raw(self, parameters: list[Parameter]) -> None:
        """Change what is listed, without anybody's noticing."""
        list.__setitem__(self, slice(None), parameters)

    def __add__(self, other: Any) -> Any:
        self.looked_at()
        return self.raw() + list(other)

    def __radd__(self, other: Any) -> Any:
        self.looked_at()
        return other + type(other)(self.raw())

    def __reversed__(self) -> Iterator[Parameter]:
        self.looked_at()
        return iter(self.raw()[::-1])


def _looking(name: str) -> Callable[..., Any]:
    native = getattr(list, name)

    def method(self: NoticingList, *args: Any) -> Any:
        self.looked_at()
        return native(self, *args)

    return method


def _editing(name: str) -> Callable[..., Any]:
    native = getattr(list, name)

    def method(self: NoticingList, *args: Any, **kwargs: Any) -> Any:
        self.about_to_be_edited()
        return native(self, *args, **kwargs)

    return method


for _name in _LOOKS:
    setattr(NoticingList, _name, _looking(_name))
for _name in _EDITS:
    setattr(NoticingList, _name, _editing(_name))


class EditedParameters(list[Parameter]):
    """What becomes of a live list that somebody has edited: an ordinary list."""


# ---------------------------------------------------------------------------------------------
# Lists that are gone through together, as by zip()


class _Together(threading.local):
    place: tuple[int, int] | None = None
    lists: list[weakref.ref[NoticingList]]


_together = _Together()


def gone_through_with(new: NoticingList, frame: FrameType | None) -> list[NoticingList]:
    """The lists that one call of a script goes through, as ``zip(net.trainable_params(), copy.trainable_params())``.

    ``zip`` asks all of them for iterators before it takes anything out of the first.
    """
    while frame is not None and frame.f_code.co_filename.startswith(internals.PACKAGE):
        frame = frame.f_back
    place = None if frame is None else (id(frame), frame.f_lasti)
    if place is None or place != _together.place:
        _together.place, _together.lists = place, []
    _together.lists.append(weakref.ref(new))
    return [alive for alive in (known() for known in _together.lists) if alive is not None]


def nobody_looks() -> bool:
    """Whether it isn't a script that looks at a list, but lazycell itself, or a cell that the list is assigned to."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and str(frame.f_globals.get("__name__")) in ("lazycell._listed", "lazycell._live"):
        frame = frame.f_back
    if frame is None:
        return True
    return frame.f_code.co_filename.startswith(internals.PACKAGE) or internals.is_cells_own_code(frame)
