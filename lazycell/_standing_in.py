"""What stands in for MindSpore's optimizers under the patch: looks like them, and waits for its parameters."""

from __future__ import annotations

import functools
import logging
from typing import Any

from mindspore import nn

from lazycell import _mindspore as internals
from lazycell import _tracking
from lazycell._dry_run import touch_by
from lazycell._listed import Patched
from lazycell._optimizer import LazyOptimizer, is_native_being_built
from lazycell._touching import own_children, own_parameters, subtree

_log = logging.getLogger("lazycell")

# What can be asked before the first step without having state for all parameters.
_COMMON = frozenset(
    "dynamic_lr get_lr global_step is_group is_group_lr learning_rate loss_scale need_scale".split()
)


class StandIn(LazyOptimizer):
    """A `LazyOptimizer` that scripts take for the optimizer they asked for.

    It holds what required a gradient when it was built, as a copied list would. What is asked of it before the first
    step it answers, if need be for all of its parameters, which count as used then. What is touched is updated at each
    step, as by MindSpore.
    """

    __module__ = "lazycell"

    def _stand_in(self, factory: type[nn.Cell], *args: Any, **kwargs: Any) -> None:
        """What its ``__init__`` does; that of each class takes what ``factory`` takes."""
        LazyOptimizer.__init__(self, factory, *args, activity=False, **kwargs)
        self.parameters.fix()
        if internals.is_librarys(factory):  # one of a user's own may not be made for a single parameter
            self._make_early()  # refuses what MindSpore refuses

    def _answering(self, name: str) -> nn.Cell:
        if not name.startswith("_") and not self.parameters.counted():
            if name in _COMMON and not internals.has_groups(self._factory):
                return self._like()
            if hasattr(self._like(), name):
                self.bear(name)
        return super()._answering(name)

    def update_parameters_name(self, prefix: str = "", recurse: bool = True) -> None:
        """Rename the parameters to be updated, as MindSpore's optimizers do; later than the first step, nothing."""
        if not self._natives:
            for parameter in self.parameters._all:
                parameter.name = prefix + parameter.name


_classes: dict[type, type] = {}


def stand_in(factory: type) -> type:
    """The class to make an instance of where an optimizer is wanted that waits for its parameters.

    Where none is needed, or where it isn't known which argument the parameters are, it is ``factory`` itself.
    """
    if is_native_being_built() or issubclass(factory, LazyOptimizer) or not internals.takes_parameters_first(factory):
        return factory
    if factory not in _classes:

        def __init__(self: StandIn, *args: Any, **kwargs: Any) -> None:
            self._stand_in(factory, *args, **kwargs)

        names = {"__module__": factory.__module__, "__qualname__": factory.__qualname__, "__doc__": factory.__doc__}
        functools.update_wrapper(__init__, factory.__init__)
        _classes[factory] = type(factory.__name__, (StandIn, factory), {**names, "__init__": __init__})
    return _classes[factory]


def bear_before_compilation(cell: nn.Cell, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Let optimizers inside a cell that is about to be compiled have something to update, under the patch.

    A training cell calls its one net with its own arguments, as MindSpore's do: a dry run tells what that uses. Of
    others, all parameters count.
    """
    owners = [owner for _, owner in cell.cells_and_names()] if Patched.active else []
    optimizers = [child for owner in owners for child in owner._cells.values() if isinstance(child, LazyOptimizer)]
    unborn = [optimizer for optimizer in optimizers if not optimizer.parameters.counted()]
    if not unborn:
        return
    nets = [child for _, child in own_children(cell) if any(map(own_parameters, subtree(child)))]
    if len(nets) == 1:
        try:
            touch_by(nets[0], args, kwargs)
        except Exception as error:
            names = type(nets[0]).__name__, type(cell).__name__
            _log.debug("%s isn't called with the arguments of %s: %r", *names, error)
    for optimizer in unborn:
        optimizer.bear("construct")


_tracking.compilation_listeners.append(bear_before_compilation)
