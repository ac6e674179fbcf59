"""Parameters whose shape isn't known yet: they have a name, a dtype and flags, and wait for their layer's size.

Such a parameter is a deferred one whose class refuses to answer for shape and values. Its object stays the same when it
gets its shape, and its values later on.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any, Protocol, cast

from mindspore import Parameter, Tensor

from lazycell import _mindspore as internals
from lazycell._deferral import become_deferred, deferred_class, is_deferred
from lazycell._errors import UntouchedError

_KEY = "_lazycell_sizing"
_HOOKS = "_lazycell_hooks"
_classes: dict[type, type] = {}


class Sizing(Protocol):
    """What knows how a parameter comes by its shape."""

    def error(self, parameter: Parameter) -> UntouchedError:
        """What to raise if somebody needs the shape or the values before that."""

    def size_by_parameter(self, parameter: Parameter, shape: tuple[int, ...]) -> None:
        """Give the parameter a shape, and its layer the size that goes with it, since a value of that shape arrives."""


class _Unsized:
    """What an unsized parameter does differently from the deferred class it is mixed into."""

    __slots__ = ()

    def __getattribute__(self, name: str) -> Any:
        if name == "data":
            return self
        frame = sys._getframe().f_back
        if name in internals.SHAPE:
            value = internals.about_to_be_loaded(frame)
            if value is not None and not is_unsized(value):
                return getattr(_sized_like(cast(Parameter, self), value), name)
            raise sizing_of(cast(Parameter, self)).error(cast(Parameter, self))
        if name != internals.IN_PLACE_OF_OPERATORS and internals.needs_values(cast(Parameter, self), name, frame):
            raise sizing_of(cast(Parameter, self)).error(cast(Parameter, self))
        return object.__getattribute__(self, name)

    def __str__(self) -> str:
        parameter = cast(Parameter, self)
        flags = f"dtype={parameter.dtype}, requires_grad={parameter.requires_grad}"
        return f"Parameter (name={parameter.name}, shape=?, {flags})"

    __repr__ = __str__

    def __deepcopy__(self, memo: dict[int, Any]) -> Parameter:
        parameter = cast(Parameter, self)
        twin = internals.copy_without_shape(parameter)
        memo[id(self)] = twin  # what it waits for refers to it
        return become_unsized(twin, copy.deepcopy(sizing_of(parameter), memo))

    def _lazycell_require_shape(self) -> None:
        raise sizing_of(cast(Parameter, self)).error(cast(Parameter, self))

    def init_data(self, layout: Any = None, set_sliced: bool = False) -> Parameter:
        """Refuse; but MindSpore, which asks all parameters on its way, comes to those that it needs once more."""
        if not internals.filled_by_library(sys._getframe().f_back):
            self._lazycell_require_shape()
        return cast(Parameter, self)

    def assign_value(self, value: Tensor) -> Parameter:
        """Take values, and their shape."""
        return cast(Parameter, _sized_like(cast(Parameter, self), value).assign_value(value))

    def set_data(self, data: Any, slice_shape: bool = False) -> Parameter:
        """Take values or an initializer, and the shape of either."""
        if not isinstance(data, Tensor):
            self._lazycell_require_shape()
        return cast(Parameter, _sized_like(cast(Parameter, self), data).set_data(data, slice_shape))

    def register_hook(self, hook: Callable[[Tensor], Any]) -> Any:
        """Take note of a hook: MindSpore's tensor, which knows it, is another one once there is a shape."""
        handle = type(self)._lazycell_native.register_hook(self, hook)  # type: ignore[attr-defined]
        self.__dict__.setdefault(_HOOKS, []).append((handle, hook))
        return handle


def _sized_like(parameter: Parameter, value: Tensor) -> Parameter:
    sizing_of(parameter).size_by_parameter(parameter, tuple(value.shape))
    return parameter


def _refusing_method(name: str) -> Callable[..., Any]:
    def method(self: Parameter, *args: Any, **kwargs: Any) -> Any:
        raise sizing_of(self).error(self)

    method.__name__ = name
    return method


def _unsized_class(native: type) -> type:
    if native not in _classes:
        deferred = deferred_class(native)
        refused = (*internals.value_dunders(native), internals.IN_PLACE_OF_OPERATORS)
        namespace: dict[str, Any] = {name: _refusing_method(name) for name in refused}
        namespace |= {"__slots__": (), "_lazycell_native": native, "__hash__": native.__hash__}
        namespace |= {"__module__": native.__module__, "__qualname__": native.__qualname__, "__doc__": native.__doc__}
        _classes[native] = type(native.__name__, (_Unsized, deferred), namespace)
    return _classes[native]


def become_unsized(parameter: Parameter, sizing: Sizing) -> Parameter:
    """Let a parameter forget its shape until something gives it one; returns the same object."""
    become_deferred(parameter)
    parameter.__dict__[_KEY] = sizing
    parameter.__class__ = _unsized_class(type(parameter)._lazycell_native)
    return parameter


def is_unsized(parameter: Any) -> bool:
    """Whether a parameter's shape isn't known yet; it is deferred as well then."""
    return issubclass(type(parameter), _Unsized)


def sizing_of(parameter: Parameter) -> Sizing:
    """What an unsized parameter waits for."""
    sizing: Sizing = object.__getattribute__(parameter, "__dict__")[_KEY]
    return sizing


def give_shape(parameter: Parameter, like: Parameter) -> None:
    """Give an unsized parameter the shape and the initial values of another; it stays without storage if that is.

    If that waits, too, it waits for what that waits for.
    """
    native = type(parameter)._lazycell_native
    hooks = _hooks_left(parameter)
    internals.give_shape(native, parameter, like)
    for handle, hook in hooks:
        handle.id = native.register_hook(parameter, hook).id
    if is_unsized(like):
        parameter.__dict__[_KEY] = sizing_of(like)
        return
    del parameter.__dict__[_KEY]
    parameter.__dict__.pop(_HOOKS, None)
    parameter.__class__ = deferred_class(native) if is_deferred(like) else native


def _hooks_left(parameter: Parameter) -> list[tuple[Any, Any]]:
    """The hooks of an unsized parameter that nobody has removed, with their handles."""
    left = list(type(parameter)._lazycell_native.hooks(parameter))
    return [(handle, hook) for handle, hook in parameter.__dict__.get(_HOOKS, []) if _taken_from(left, hook)]


def _taken_from(things: list[Any], thing: Any) -> bool:
    if thing not in things:
        return False
    things.remove(thing)
    return True


def give_nominal_shape(parameter: Parameter) -> None:
    """Let an unsized parameter have the shape that it was built with; its values are about to be assigned."""
    native = type(parameter)._lazycell_native
    del parameter.__dict__[_KEY]
    parameter.__dict__.pop(_HOOKS, None)
    parameter.__class__ = deferred_class(native) if parameter.has_init else native


def num_elements(parameter: Parameter) -> int:
    """How many elements a parameter has; 0 as long as nobody knows."""
    return 0 if is_unsized(parameter) else int(parameter.size)


def num_bytes(parameter: Parameter) -> int:
    """How many bytes a parameter takes, or would take; 0 as long as nobody knows."""
    return 0 if is_unsized(parameter) else int(parameter.nbytes)
