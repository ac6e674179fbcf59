"""From the outermost ``LazyCell.__init__`` on: defer what is built, and watch it once it stands."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from mindspore import Parameter, nn

from lazycell import _deferral
from lazycell import _mindspore as internals
from lazycell import _touching, _tracking

_MARK = "_lazycell_constructing"


class _Construction(threading.local):
    """What the outermost constructor of this thread has built so far."""

    depth = 0
    cells: list[nn.Cell]
    optimizers: list[nn.Cell]
    parameters: list[Parameter]
    store: _deferral.ValueStore | None = None

    def get_store(self) -> _deferral.ValueStore:
        """One file per construction, made when the first value needs it."""
        if self.store is None:
            self.store = _deferral.ValueStore()
        return self.store


_current = _Construction()


def _on_cell(cell: nn.Cell) -> None:
    if internals.is_layer(cell):
        _tracking.begin(cell)
        _current.cells.append(cell)
    elif internals.is_optimizer_class(type(cell)):
        _current.optimizers.append(cell)


def _on_parameter(parameter: Parameter) -> None:
    _deferral.defer(parameter, _current.get_store)
    _current.parameters.append(parameter)


_hooks = internals.ConstructionHooks(lambda: _current.depth > 0, _on_cell, _on_parameter)


@contextmanager
def constructing() -> Iterator[None]:
    """Defer every parameter that this thread builds inside; nested uses belong to the outermost one."""
    if _current.depth:
        _current.depth += 1
        try:
            yield
        finally:
            _current.depth -= 1
        return
    internals.require_known_internals()
    _current.cells, _current.optimizers, _current.parameters, _current.store = [], [], [], None
    with _hooks.open():
        _current.depth = 1
        try:
            yield
        finally:
            _current.depth = 0
            cells, optimizers, parameters = _current.cells, _current.optimizers, _current.parameters
            del _current.cells, _current.optimizers, _current.parameters, _current.store
    _finish(cells, optimizers, parameters)


@contextmanager
def suspended() -> Iterator[None]:
    """Build as MindSpore does, though a constructor may be running."""
    depth, _current.depth = _current.depth, 0
    try:
        yield
    finally:
        _current.depth = depth


def _finish(cells: list[nn.Cell], optimizers: list[nn.Cell], parameters: list[Parameter]) -> None:
    for optimizer in optimizers:  # nobody watches what their graphs hold
        for parameter in _touching.own_parameters(optimizer) + _touching.hidden_parameters(optimizer):
            _deferral.materialize(parameter)
    cells = list(_touching.subtree(*cells))  # with those that a constructor copied rather than built
    for cell in cells:
        if _touching.state_of(cell) is not None:
            _tracking.watch(cell)
    if not internals.OPERATORS_ASK:
        # Older MindSpore hands parameters to operators unseen. One that no cell keeps would reach them
        # without values.
        kept = {id(p) for cell in cells for p in _touching.own_parameters(cell) + _touching.hidden_parameters(cell)}
        for parameter in parameters:
            if id(parameter) not in kept:
                _deferral.materialize(parameter)


def prepare(cls: type, wanted: Callable[[], bool] = lambda: True) -> bool:
    """Let a class's ``__init__``, from its first line to its last, count as construction.

    Args:
        cls: The class.
        wanted: Whether it is to count, asked at each construction.

    Returns:
        False if it was so before, or is so by inheritance.
    """
    inherited: Callable[..., None] = cls.__init__  # type: ignore[misc]
    own: Callable[..., None] | None = cls.__dict__.get("__init__")
    if hasattr(own or inherited, _MARK):
        return False

    @functools.wraps(inherited)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        with constructing() if wanted() else nullcontext():
            # A class without an __init__ must not stand between its bases in a subclass's order.
            init = own.__get__(self) if own else super(cls, self).__init__  # type: ignore[arg-type]
            init(*args, **kwargs)

    setattr(__init__, _MARK, own)
    cls.__init__ = __init__  # type: ignore[misc]
    return True


def leave(cls: type) -> None:
    """Undo `prepare`, unless someone has put another ``__init__`` there since."""
    init = cls.__dict__.get("__init__")
    if not hasattr(init, _MARK):
        return
    own = getattr(init, _MARK)
    if own is None:
        del cls.__init__  # type: ignore[misc]
    else:
        cls.__init__ = own  # type: ignore[misc]
