"""Layers that infer their sizes: what waits for them, and becomes the eager layer once something tells them."""

from __future__ import annotations

import copy
import functools
import inspect
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

from mindspore import Parameter, nn

from lazycell import _construction, _deferral
from lazycell import _mindspore as internals
from lazycell import _touching, _tracking
from lazycell._errors import LazyCellError, UntouchedError
from lazycell._reading import function_compiled
from lazycell._unsized import (
    become_unsized,
    give_nominal_shape,
    give_shape,
    is_unsized,
    sizing_of,
)

_KEY = "_lazycell_sizing"
_MISSING = object()

_UNKNOWN = """\
{name} has neither shape nor values yet: {layer} infers {sizes} from its first input. Before you ask, call the net \
once, or lazycell.dry_run(net, inputs), or load a checkpoint."""

_UNFIT = """\
{name} of {layer} can't have the shape {shape}: {why}. The layer still waits for {sizes}."""

_NO_BUILD = """\
{layer} got {given} from its first input, with which it can't be built: {error}"""


class Settled(threading.local):
    """Whom to tell in this thread that a layer has got its sizes: of its cells, and of its parameters."""

    listeners: tuple[Callable[[list[nn.Cell], list[Parameter]], None], ...] = ()


_settled = Settled()


@contextmanager
def when_sized(listener: Callable[[list[nn.Cell], list[Parameter]], None]) -> Iterator[None]:
    """Have a function called, inside, whenever this thread has given a layer its sizes."""
    before = _settled.listeners
    _settled.listeners = (*before, listener)
    try:
        yield
    finally:
        _settled.listeners = before


class WaitingLayer:
    """What a layer that waits for its sizes knows: how to be built again, from the same random numbers.

    The layer itself was built with nominal sizes, as nobody knows better. Once the sizes are known, a twin is built
    where the random streams stood. What the sizes decide goes over from it: the shapes and initial values of
    parameters, and the attributes that nobody has changed meanwhile.
    """

    all: weakref.WeakSet[WaitingLayer] = weakref.WeakSet()
    count = 0  # of all that have ever begun to wait

    def __init__(self, cell: nn.Cell, eager: type, arguments: dict[str, Any]) -> None:
        self.cell: Callable[[], nn.Cell | None] = weakref.ref(cell)
        self.eager = eager
        self.lazy = type(cell).__name__
        self.sizes: tuple[str, ...] = cell.sizes
        self.arguments = arguments
        self.nominal: dict[str, Any] = type(cell).nominal(arguments)
        self.random = internals.random_state()
        self._build_on(cell)
        self._begin()

    @classmethod
    def begin(cls, cell: nn.Cell, lazy: Any, eager: type, arguments: dict[str, Any]) -> None:
        """Build a cell with nominal sizes, and let it wait for the real ones."""
        with _construction.constructing():
            cell.__dict__[_KEY] = cls(cell, eager, arguments)
            cell.__class__ = waiting_class(lazy, eager)

    def __deepcopy__(self, memo: dict[int, Any]) -> WaitingLayer:
        copied = WaitingLayer.__new__(WaitingLayer)
        memo[id(self)] = copied
        copied.__dict__.update({name: copy.deepcopy(value, memo) for name, value in vars(self).items()})
        twin = memo.get(id(self.cell()))  # copy.deepcopy() notes a new object before it copies its parts
        copied.cell = _nothing if twin is None else weakref.ref(twin)
        copied._begin()
        return copied

    def _begin(self) -> None:
        WaitingLayer.all.add(self)
        WaitingLayer.count += 1
        on_waiting()

    def _call_arguments(self, sizes: dict[str, Any]) -> inspect.BoundArguments:
        signature = signature_of(self.eager)
        given = {**self.arguments, **sizes}
        ordered = OrderedDict((name, given[name]) for name in signature.parameters if name in given)
        return inspect.BoundArguments(signature, ordered)

    def _build_on(self, cell: nn.Cell) -> None:
        """Let the eager class's ``__init__`` run on the waiting cell, and take note of what it has made."""
        bound = self._call_arguments(self.nominal)
        self.eager.__init__(cell, *bound.args, **bound.kwargs)  # type: ignore[misc]
        given = list(_inside(self.arguments, nn.Cell))
        others = {id(inner) for outer in given for _, inner in outer.cells_and_names()}
        theirs = {id(parameter) for outer in given for parameter in _parameters_in(outer)}
        self.parameters = _parameters_in(cell)
        self.attributes = {
            name: _own_attributes(inner) for name, inner in cell.cells_and_names() if id(inner) not in others
        }
        for parameter in self.parameters:
            if id(parameter) not in theirs and not is_unsized(parameter):
                become_unsized(parameter, self)
        for _, inner in cell.cells_and_names():
            if id(inner) not in others:
                for name in self.sizes:  # nobody must take the nominal ones for real
                    vars(inner).pop(name, None)

    def _twin(self, sizes: dict[str, Any]) -> nn.Cell:
        """The eager layer, built where and as this one was; the random streams stand afterwards where they do now."""
        arguments = {name: _with_cells_copied(value) for name, value in self.arguments.items()}
        bound = self._call_arguments(sizes | {name: arguments[name] for name in arguments})
        now = internals.random_state()
        with internals.off_meta(), _deferral.no_storage(False), _construction.constructing():
            internals.set_random_state(self.random)
            try:
                return self.eager(*bound.args, **bound.kwargs)
            finally:
                internals.set_random_state(now)

    def error(self, parameter: Parameter) -> UntouchedError:
        """What to raise if somebody needs a shape or values."""
        return self.untouched(parameter.name)

    def untouched(self, name: str) -> UntouchedError:
        """What to raise if somebody needs what only the eager layer has."""
        return UntouchedError(_UNKNOWN.format(name=name, layer=self.lazy, sizes=" and ".join(self.sizes)))

    # Getting sizes

    def size_by_inputs(self, cell: nn.Cell, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Take the sizes that the first input tells."""
        sizes = cell.infer(*args, **kwargs)
        if not isinstance(sizes, dict) or set(sizes) != set(self.sizes):
            raise TypeError(f"{self.lazy}.infer() must give {list(self.sizes)} as a dict, but gave {sizes!r}.")
        try:
            self.settle(sizes)
        except (TypeError, ValueError) as error:
            given = ", ".join(f"{name}={size}" for name, size in sizes.items())
            raise LazyCellError(_NO_BUILD.format(layer=self.lazy, given=given, error=error)) from error

    def size_by_parameter(self, parameter: Parameter, shape: tuple[int, ...]) -> None:
        """Take the sizes that a parameter's value tells, one that is loaded."""
        cell = self.cell()
        index = next(i for i, known in enumerate(self.parameters) if known is parameter)
        told = {} if cell is None else cell.infer_from_parameter(self._attribute(cell, parameter), shape)
        if told is None:
            told = self._solve(index, shape)
        if not told and shape == internals.nominal_shape(parameter):
            give_nominal_shape(parameter)  # no size decides it
            return
        twin = self._twin(told) if set(told) == set(self.sizes) else None
        if twin is None or tuple(_parameters_in(twin)[index].shape) != shape:
            raise self._unfit(parameter, shape, "no size gives it" if twin else "it doesn't tell all sizes")
        self.settle(told, twin)

    def _unfit(self, parameter: Parameter, shape: tuple[int, ...], why: str) -> LazyCellError:
        words = {"name": parameter.name, "layer": self.lazy, "shape": shape, "why": why}
        return LazyCellError(_UNFIT.format(sizes=" and ".join(self.sizes), **words))

    def _attribute(self, cell: nn.Cell, parameter: Parameter) -> str:
        """The name by which the layer knows a parameter."""
        for path, inner in cell.cells_and_names():
            for name, known in OrderedDict.items(inner._params):
                if known is parameter:
                    return f"{path}.{name}" if path else str(name)
        return ""

    def _solve(self, index: int, shape: tuple[int, ...]) -> dict[str, Any]:
        """The sizes with which a parameter has a given shape, as far as it tells: dimensions grow evenly with sizes."""
        known = self._shape_with(self.nominal, index)
        told: dict[str, Any] = {}
        for name, nominal in self.nominal.items():
            other = self._shape_with({**self.nominal, name: 2 * nominal}, index)
            for at_nominal, at_twice, wanted in zip(known, other, shape):
                if at_twice != at_nominal:
                    told[name] = max(nominal * (wanted - 2 * at_nominal + at_twice) // (at_twice - at_nominal), 1)
        return told

    def _shape_with(self, sizes: dict[str, Any], index: int) -> tuple[int, ...]:
        return tuple(_parameters_in(self._twin(sizes))[index].shape)

    def settle(self, sizes: dict[str, Any], twin: nn.Cell | None = None) -> None:
        """Become the eager layer."""
        twin = self._twin(sizes) if twin is None else twin
        cell, twins = self.cell(), dict(twin.cells_and_names())
        inside = [] if cell is None else [(name, inner) for name, inner in cell.cells_and_names() if name in twins]
        for name, inner in inside:
            self._size_foreign(inner, twins[name])
        pairs = list(zip(self.parameters, _parameters_in(twin)))
        sized = [(known, new) for known, new in pairs if self._is_mine(known) or _both_wait(known, new)]
        with internals.off_meta():
            for known, new in sized:
                give_shape(known, new)
        for name, inner in inside:
            if name in self.attributes:
                _take_attributes(inner, self.attributes[name], twins[name])
            if inner is not cell:
                _take_waiting(inner, twins[name], {id(new): known for known, new in sized})
        if cell is not None:
            del cell.__dict__[_KEY]
            cell.__class__ = self.eager
            _tracking.watch(cell)
        WaitingLayer.all.discard(self)
        for listener in _settled.listeners:
            listener([inner for _, inner in inside], [known for known, _ in sized if not is_unsized(known)])

    def _is_mine(self, parameter: Parameter) -> bool:
        return is_unsized(parameter) and sizing_of(parameter) is self

    def _size_foreign(self, cell: nn.Cell, twin: nn.Cell) -> None:
        """Size what another waiting layer has put in the place of a parameter."""
        for name, parameter in list(OrderedDict.items(cell._params)):
            other = OrderedDict.get(twin._params, name)
            foreign = is_unsized(parameter) and not self._is_mine(parameter)
            if foreign and other is not None and not is_unsized(other):
                sizing_of(parameter).size_by_parameter(parameter, tuple(other.shape))


def _nothing() -> None:
    """What a reference to a cell that is gone gives."""


def signature_of(eager: type) -> inspect.Signature:
    """The arguments of a class's ``__init__`` without ``self``."""
    signature = inspect.signature(eager.__init__)  # type: ignore[misc]
    return signature.replace(parameters=list(signature.parameters.values())[1:])


def _inside(value: Any, kind: Any) -> Iterator[Any]:
    """The objects of some kind in an argument or an attribute, in containers as well."""
    if isinstance(value, kind):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _inside(item, kind)


def _holds(value: Any, kind: Any) -> bool:
    return next(_inside(value, kind), None) is not None


def _with_cells_copied(value: Any) -> Any:
    """An argument for the twin, which would rename the parameters of cells that it is given."""
    return copy.deepcopy(value) if _holds(value, nn.Cell) else value


def _own_attributes(cell: nn.Cell) -> dict[str, Any]:
    """What a cell's own class has set."""
    common = internals.attributes_of_all()
    return {
        name: value for name, value in vars(cell).items() if name not in common and not name.startswith("_lazycell")
    }


def _take_attributes(cell: nn.Cell, before: dict[str, Any], twin: nn.Cell) -> None:
    """Let a cell have a twin's attributes, except those that were changed since they were what ``before`` says."""
    for name, value in _own_attributes(twin).items():
        unchanged = vars(cell).get(name, _MISSING) is before.get(name, _MISSING) or name not in vars(cell)
        if unchanged and not _holds(value, (nn.Cell, Parameter)):  # these are in place already
            setattr(cell, name, value)


def _parameters_in(cell: nn.Cell) -> list[Parameter]:
    """The parameters of a cell and of all below it, in whatever attribute; looking is no use of them."""
    found: dict[int, Parameter] = {}
    for _, inner in cell.cells_and_names():
        for parameter in _touching.own_parameters(inner) + _touching.hidden_parameters(inner):
            found[id(parameter)] = parameter
    return list(found.values())


def _both_wait(known: Parameter, new: Parameter) -> bool:
    """Whether parameters belong to a layer, inside the one that gets its sizes, that goes on to wait."""
    return is_unsized(known) and is_unsized(new)


def _take_waiting(cell: nn.Cell, twin: nn.Cell, known: dict[int, Parameter]) -> None:
    """Let a cell wait for what its twin inside another twin waits for: its arguments may depend on the outer sizes."""
    old, new = waiting_layer(cell), waiting_layer(twin)
    if old is not None and new is not None:
        WaitingLayer.all.discard(old)
        new.parameters = [known.get(id(parameter), parameter) for parameter in new.parameters]
        new.cell = weakref.ref(cell)
        cell.__dict__[_KEY] = new


# ---------------------------------------------------------------------------------------------
# Cells that wait


def waiting_layer(cell: nn.Cell) -> WaitingLayer | None:
    """What a cell that waits for its sizes knows; None for others."""
    found: WaitingLayer | None = cell.__dict__.get(_KEY)
    return found


_waiting_classes: weakref.WeakKeyDictionary[type, weakref.ref[type]] = weakref.WeakKeyDictionary()


def note_resolved(cell: nn.Cell) -> None:
    """What is being compiled may come to hold a cell that waits for its sizes."""
    _resolved.add(cell)
    if internals.forward_running()[0] is internals.Forward.JIT:
        internals.when_function_is_compiled(function_compiled).append(cell)


_resolved: weakref.WeakSet[nn.Cell] = weakref.WeakSet()


def resolved_waiting() -> list[str]:
    """The classes of the waiting layers that compilations have come across since this was asked the last time."""
    found = [waiting.lazy for waiting in map(waiting_layer, _resolved) if waiting is not None]
    _resolved.clear()
    return found


class _WaitingConstruct:
    """``construct`` of a waiting cell: the first input gives the sizes, and goes on to the eager layer."""

    def __init__(self, lazy: Any) -> None:
        @functools.wraps(lazy.construct)
        def waiting_construct(cell: nn.Cell, *args: Any, **kwargs: Any) -> Any:
            with _touching.lock:
                waiting = waiting_layer(cell)
                if waiting is not None:
                    bound = inspect.signature(lazy.construct).bind(cell, *args, **kwargs)
                    waiting.size_by_inputs(cell, bound.args[1:], bound.kwargs)
            return cell.construct(*args, **kwargs)

        self._lazy = lazy
        self._function = waiting_construct

    def __get__(self, cell: nn.Cell | None, owner: type) -> Any:
        if cell is None:
            return self._lazy.construct
        if waiting_layer(cell) is not None and internals.parser_asks(sys._getframe().f_back):
            # It asks all of a CellList, whichever are called. What the graph comes to hold is refused when it is
            # finished, as parameters without a shape can't be touched.
            note_resolved(cell)
            return MethodType(self._lazy.construct, cell)
        return MethodType(self._function, cell)


def waiting_class(lazy: Any, eager: type) -> type:
    """The class of cells that wait; tracked as a watched cell of the eager class, which its own call unwatches."""
    known = _waiting_classes.get(lazy)
    made = known() if known is not None else None
    if made is None:

        def __getattr__(cell: nn.Cell, name: str) -> Any:
            waiting = cell.__dict__.get(_KEY)
            if waiting is not None and name in waiting.sizes:
                raise waiting.untouched(name)
            return lazy.__getattr__(cell, name)

        def __repr__(cell: nn.Cell) -> str:
            waiting = cell.__dict__[_KEY]
            shown = dict.fromkeys(waiting.sizes, "?") | waiting.arguments
            return f"{type(cell).__name__}({', '.join(f'{name}={value}' for name, value in shown.items())})"

        # MindSpore looks by these whether a layer is its own, and where the source is.
        names = {"__module__": eager.__module__, "__qualname__": eager.__qualname__, "__doc__": lazy.__doc__}
        namespace = {"__slots__": (), "_lazycell_native": eager, "construct": _WaitingConstruct(lazy), **names}
        namespace |= {"__getattr__": __getattr__, "__repr__": __repr__}
        made = internals.subclass_unseen(lazy, namespace)
        _waiting_classes[lazy] = weakref.ref(made)
    return made


on_waiting: Callable[[], None] = _nothing  # called when a layer begins to wait; _sized_graphs puts its own here
