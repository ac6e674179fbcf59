"""Build parameters without storage, and materialize them bit-identically.

A deferred parameter is an ordinary ``Parameter`` that holds an initializer and no memory. Its class is
swapped for a subclass that lets shape, dtype and other metadata through, and materializes the
parameter before anything reads or writes its values. Materializing puts the class back.
"""

from __future__ import annotations

import copy
import os
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
from mindspore import Parameter, Tensor

from lazycell import _mindspore as internals
from lazycell._errors import LazyCellError, LazyCellWarning, user_location, warn

_lock = threading.RLock()
_classes: dict[type, type] = {}


class _Deferred:
    """What a deferred parameter does differently from the native class it is mixed into."""

    __slots__ = ()
    _lazycell_native: type

    def __getattribute__(self, name: str) -> Any:
        # Not super(): another thread may swap the class at any point.
        if name == "data":
            return self
        if internals.needs_values(cast(Parameter, self), name, sys._getframe().f_back):
            read(cast(Parameter, self))
        return object.__getattribute__(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "data":
            read(cast(Parameter, self))
        object.__setattr__(self, name, value)
        if name in _MISSPELT:
            check_spelling(cast(Parameter, self))

    def __deepcopy__(self, memo: dict[int, Any]) -> Parameter:
        init = copy.deepcopy(self.init_mode.init, memo)
        return become_deferred(internals.parameter_without_storage(init, cast(Parameter, self), self.shape))

    def _lazycell_require_shape(self) -> None:
        """Refuse to go on if the shape isn't known yet; here it is."""

    def init_data(self, layout: Any = None, set_sliced: bool = False) -> Parameter:
        """Materialize; what MindSpore calls to fill a parameter it finds without values."""
        if internals.must_be_filled(cast(Parameter, self), sys._getframe().f_back):
            materialize(cast(Parameter, self))
        return cast(Parameter, self)

    def assign_value(self, value: Tensor) -> Parameter:
        """Take values without drawing the initial ones first."""
        with _lock:
            parameter = cast(Parameter, self)
            if is_deferred(parameter):
                _refuse_if_postponed(parameter)
                if is_deferred(value):
                    materialize(cast(Parameter, value))
                internals.assign_storage(self._lazycell_native, parameter, value)
                _become_native(parameter)
                return parameter
        return parameter.assign_value(value)

    def set_data(self, data: Any, slice_shape: bool = False) -> Parameter:
        """Take values, or another initializer, which is then drawn at this point of the random stream."""
        parameter = cast(Parameter, self)
        _refuse_if_postponed(parameter)
        if _is_initializer_for(data, parameter):
            if internals.record_draw(data):
                internals.set_initializer(parameter, data)
                return parameter
            data.init_data()
        if not isinstance(data, Tensor) or data.shape != parameter.shape or data.dtype != parameter.dtype:
            materialize(parameter)  # to be converted or refused, as MindSpore does it
            return parameter.set_data(data, slice_shape)
        parameter.assign_value(data)
        parameter.sliced = slice_shape
        return parameter


def _is_initializer_for(data: Any, parameter: Parameter) -> bool:
    if not isinstance(data, Tensor) or is_deferred(data):
        return False
    return bool(data.has_init and data.shape == parameter.shape and data.dtype == parameter.dtype)


def _value_method(name: str) -> Callable[..., Any]:
    def method(self: Parameter, *args: Any, **kwargs: Any) -> Any:
        read(self)
        # The class is still the deferred one if storage is postponed: shapes will do.
        return getattr(getattr(type(self), "_lazycell_native", type(self)), name)(self, *args, **kwargs)

    method.__name__ = name
    return method


def deferred_class(native: type) -> type:
    """The class of deferred parameters that are of some native class otherwise."""
    if native not in _classes:
        namespace: dict[str, Any] = {name: _value_method(name) for name in internals.value_dunders(native)}
        namespace |= {"__slots__": (), "_lazycell_native": native}
        namespace |= {"__module__": native.__module__, "__qualname__": native.__qualname__, "__doc__": native.__doc__}
        namespace |= {"__hash__": native.__hash__}  # defining __eq__ alone would take it away
        _classes[native] = type(native.__name__, (_Deferred, native), namespace)
    return _classes[native]


def become_deferred(parameter: Parameter) -> Parameter:
    """Swap the class of a parameter without storage; returns the same object."""
    internals.guard_operators(is_deferred, read)
    if not is_deferred(parameter):
        parameter.__class__ = deferred_class(type(parameter))
    return parameter


def _become_native(parameter: Parameter) -> None:
    parameter.__class__ = type(parameter)._lazycell_native


def is_deferred(parameter: Any) -> bool:
    """Whether a parameter has name, shape, dtype and initializer, but no storage."""
    return issubclass(type(parameter), _Deferred)


def deferred_among(parameters: list[Parameter]) -> list[Parameter]:
    """Which of some parameters are deferred; asked at each step, where none is."""
    if not any([issubclass(kind, _Deferred) for kind in {type(parameter) for parameter in parameters}]):
        return []
    return [parameter for parameter in parameters if is_deferred(parameter)]


class _Postponed(threading.local):
    active = False


_postponed = _Postponed()


@contextmanager
def no_storage(refused: bool = True) -> Iterator[None]:
    """Refuse to materialize anything in this thread: it computes shapes, on a device without storage; or allow it."""
    before, _postponed.active = _postponed.active, refused
    try:
        yield
    finally:
        _postponed.active = before


def _refuse_if_postponed(parameter: Parameter) -> None:
    if _postponed.active:
        raise LazyCellError(f"the values of {parameter.name} are needed where only shapes are computed.")


def materialize(parameter: Parameter) -> None:
    """Give a parameter its storage and its initial values; the object stays the same.

    Raises:
        LazyCellError: Inside `no_storage`.
        UntouchedError: The shape isn't known yet.
        Exception: Whatever the initializer raises; the parameter stays deferred then.
    """
    with _lock:
        if is_deferred(parameter):
            require_shape(parameter)
            _refuse_if_postponed(parameter)
            # The class goes back last, so that no other thread can meet a native class without values.
            internals.fill_storage(type(parameter)._lazycell_native, parameter)
            _become_native(parameter)


def require_shape(parameter: Parameter) -> None:
    """Refuse a parameter whose shape isn't known yet.

    Raises:
        UntouchedError: It isn't.
    """
    if is_deferred(parameter):
        parameter._lazycell_require_shape()


def read(parameter: Parameter) -> None:
    """Values are about to be used somewhere that no cell can see."""
    on_read(parameter)


on_read: Callable[[Parameter], None] = materialize  # _tracking puts its own here, which also touches


# ---------------------------------------------------------------------------------------------
# Spelling

_MISSPELT = frozenset(
    """
    require_grad require_grads requires_grads required_grad requiregrad requiresgrad require_gradient require_gradients
    requires_gradient requires_gradients
    """.split()
)
_MISSPELT_TEXT = """\
{name}.{attribute} was assigned, which MindSpore takes for an attribute of your own: it freezes nothing. The name is \
requires_grad; or call lazycell.freeze()."""


def check_spelling(parameter: Parameter) -> None:
    """Warn of a misspelt ``requires_grad``, once for each parameter, and for each of the user's lines."""
    for attribute in _MISSPELT.intersection(vars(parameter)):
        if "_lazycell_misspelt" not in vars(parameter):
            parameter._lazycell_misspelt = user_location(), attribute
            if parameter._lazycell_misspelt not in _misspelt_lines:
                _misspelt_lines.add(parameter._lazycell_misspelt)
                warn(LazyCellWarning(_MISSPELT_TEXT.format(name=parameter.name, attribute=attribute)))


_misspelt_lines: set[tuple[str | None, str]] = set()


# ---------------------------------------------------------------------------------------------
# Deferring


class ValueStore:
    """Values that no initializer can reproduce, kept in an unnamed temporary file until they are needed.

    The file lives in the directory of Python's ``tempfile`` (``TMPDIR``) and is gone with the last
    parameter that refers to it.
    """

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(prefix="lazycell-")
        weakref.finalize(self, self._file.close)
        self._lock = threading.Lock()

    def put(self, array: np.ndarray[Any, Any]) -> Callable[[np.ndarray[Any, Any]], None]:
        """Store an array; the function returned writes it back into one of the same shape and dtype."""
        with self._lock:
            offset = self._file.seek(0, os.SEEK_END)
            self._file.write(array.reshape(-1).view(np.uint8).data)
            self._file.flush()

        def get(target: np.ndarray[Any, Any]) -> None:
            flat = np.empty(target.nbytes, np.uint8)
            with self._lock:
                self._file.seek(offset)
                if self._file.readinto(flat.data) != target.nbytes:
                    raise OSError("the temporary file that held a parameter's values was cut short")
            target[...] = flat.view(target.dtype).reshape(target.shape)

        return get


def _is_one_value(flat: np.ndarray[Any, Any]) -> bool:
    """Whether all elements have the same bits (so that NaN equals NaN, and 0.0 differs from -0.0)."""
    raw = flat.view(np.uint8).reshape(flat.size, flat.itemsize)
    return bool((raw[-1] == raw[0]).all() and (raw == raw[0]).all())


def _kept_values(parameter: Parameter, store: Callable[[], ValueStore]) -> internals.KeptValues | None:
    """An initializer that brings a parameter's present values back, or None where there can be none."""
    array = np.ascontiguousarray(parameter.asnumpy())
    if not array.size or array.nbytes != parameter.nbytes:  # a dtype that NumPy stores otherwise
        return None
    flat = array.reshape(-1)
    if _is_one_value(flat):
        value = flat[:1].copy()
        return internals.KeptValues(lambda target: target.fill(value[0]))
    try:
        return internals.KeptValues(store().put(array))
    except OSError:  # no room: the values stay in memory
        return None


def drop(parameter: Parameter, store: Callable[[], ValueStore]) -> bool:
    """Free a materialized parameter's memory, its values kept where they can be brought back from.

    Args:
        parameter: A parameter with storage.
        store: Gives the file to put values in; asked only if one is needed.

    Returns:
        Whether the memory was freed.
    """
    with _lock:
        init = None if is_deferred(parameter) else _kept_values(parameter, store)
        if init is None:
            return False
        internals.drop_storage(parameter, init)
        become_deferred(parameter)
        return True


def defer(parameter: Parameter, store: Callable[[], ValueStore]) -> None:
    """Defer a parameter that was just built, whatever it was built from.

    One built from an initializer holds no memory yet: its seed is drawn now, as plain MindSpore
    would. One built from data, or from an initializer that draws in ways of its own, gives its memory back.
    """
    if not internals.can_be_deferred(parameter):
        parameter.init_data()
        return
    if internals.is_without_storage(parameter) and internals.record_draw(parameter.init_mode):
        internals.set_initializer(parameter, parameter.init_mode)
        become_deferred(parameter)
    else:
        parameter.init_data()
        drop(parameter, store)
