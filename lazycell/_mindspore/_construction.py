"""Telling of every cell and parameter that is constructed; replacing attributes, and undoing it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from mindspore import Parameter, nn


class _InitParamFlag:
    """Stands in for ``Parameter.init_param``: False in threads that defer, True in all others."""

    def __init__(self, deferring: Callable[[], bool]) -> None:
        self._deferring = deferring

    def __get__(self, instance: object, owner: type) -> bool:
        return not self._deferring()


class ConstructionHooks:
    """Tells of every cell and parameter that the current thread constructs, while one is open.

    Args:
        deferring: Whether the current thread wants to know.
        on_cell: Called with each new cell, its ``Cell.__init__`` done.
        on_parameter: Called with each new parameter, its ``Parameter.__init__`` done.
    """

    def __init__(
        self,
        deferring: Callable[[], bool],
        on_cell: Callable[[nn.Cell], None],
        on_parameter: Callable[[Parameter], None],
    ) -> None:
        self._lock = threading.Lock()
        self._open = 0
        self._undo: list[Callable[[], bool]] = []
        self._deferring = deferring
        self._on = {nn.Cell: on_cell, Parameter: on_parameter}

    @contextmanager
    def open(self) -> Iterator[None]:
        """Install the hooks for as long as any thread has them open."""
        with self._lock:
            self._open += 1
            if self._open == 1:
                self._install()
        try:
            yield
        finally:
            with self._lock:
                self._open -= 1
                if not self._open:
                    while self._undo:
                        self._undo.pop()()

    def _install(self) -> None:
        self._undo.append(replace_attribute(Parameter, "init_param", _InitParamFlag(self._deferring)))
        for owner in self._on:
            self._undo.append(replace_attribute(owner, "__init__", self._hooked_init(owner)))

    def _hooked_init(self, owner: type) -> Callable[..., None]:
        native, notify, deferring = owner.__init__, self._on[owner], self._deferring  # type: ignore[misc]

        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            native(self, *args, **kwargs)
            if deferring():
                notify(self)

        return __init__


def holders_of(function: Any) -> list[ModuleType]:
    """MindSpore's modules that hold a function under its own name."""
    modules = [module for name, module in list(sys.modules.items()) if name.partition(".")[0] == "mindspore"]
    return [m for m in modules if isinstance(m, ModuleType) and vars(m).get(function.__name__) is function]


def replace_attribute(owner: Any, name: str, value: object) -> Callable[[], bool]:
    """Set an attribute of a class or a module.

    Returns:
        A function that puts back exactly what stood there, if anything did; False if somebody has replaced ours
        meanwhile: what stands there now is theirs, and is left.
    """
    missing = object()
    before = owner.__dict__.get(name, missing)
    setattr(owner, name, value)

    def undo() -> bool:
        if owner.__dict__.get(name) is not value:
            return False
        if before is missing:
            delattr(owner, name)
        else:
            setattr(owner, name, before)
        return True

    return undo
