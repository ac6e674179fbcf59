"""LazyCell, and what can be asked of a tracked cell."""

from __future__ import annotations

from typing import Any, TypeVar

from mindspore import nn

from lazycell import _construction, _deferral
from lazycell import _mindspore as internals
from lazycell import _touching, _tracking
from lazycell._errors import UntouchedError, the_first
from lazycell._live import TouchedParameters, trainable_params
from lazycell._registry import require_cell, require_tracked
from lazycell._sizing import waiting_layer

C = TypeVar("C", bound=nn.Cell)

_WAITS = """\
{name} can't be allocated yet: the first input gives the sizes of {layers}. Call the net once, or \
lazycell.dry_run(net, inputs), or load a checkpoint."""


class LazyCell(nn.Cell):  # type: ignore[misc]
    """A drop-in for ``nn.Cell`` whose parameters are materialized at the first use inside ``construct``.

    From the first line of its ``__init__`` on, every parameter built, by whichever layer, knows its name, shape,
    dtype and initial values but holds no memory. Values are bit-identical to those of plain ``nn.Cell`` under the
    same seed, in whatever order layers come to be used.

    Args:
        auto_prefix: As in ``nn.Cell``.
        flags: As in ``nn.Cell``.

    Example:
        >>> import lazycell, mindspore as ms
        >>> from mindspore import nn
        >>> class Net(lazycell.LazyCell):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.body = nn.Dense(3, 2)
        ...         self.head = lazycell.optional(nn.Dense(2, 1))
        ...     def construct(self, x, with_head=False):
        ...         x = self.body(x)
        ...         return self.head(x) if with_head else x
        >>> net = Net()
        >>> y = net(ms.ops.ones((1, 3)))
        >>> [p.name for p in net.trainable_params()]
        ['body.weight', 'body.bias']
        >>> y = net(ms.ops.ones((1, 3)), True)
        >>> [p.name for p in net.trainable_params()]
        ['body.weight', 'body.bias', 'head.weight', 'head.bias']
    """

    # __module__ stays what it is: MindSpore reads the sources of a net's classes by it.

    compile_phase = internals.compile_phase

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        _construction.prepare(cls)
        return super().__new__(cls, *args, **kwargs)

    def __init__(self, auto_prefix: bool = True, flags: dict[str, Any] | None = None) -> None:
        super().__init__(auto_prefix, flags)

    def trainable_params(self, recurse: bool = True) -> TouchedParameters:
        """The touched parameters that require a gradient; see `lazycell.trainable_params`."""
        return trainable_params(self, recurse)


def track(cell: C) -> C:
    """Adopt an already built plain ``nn.Cell``: from now on it is known what of it is used.

    Its parameters have storage already; `release` frees that of the unused ones. Its own
    ``trainable_params()`` stays what it was: ask ``lazycell.trainable_params(cell)`` for the touched ones.

    Args:
        cell: Any cell. Layers that were called before count as used; the next forward pass reports the others.

    Returns:
        The same cell.

    Raises:
        TypeError: ``cell`` is no cell.

    Example:
        >>> import lazycell, mindspore as ms
        >>> from mindspore import nn
        >>> net = lazycell.track(nn.CellList([nn.Dense(3, 2), nn.Dense(3, 2)]))
        >>> y = net[0](ms.ops.ones((1, 3)))
        >>> lazycell.release(net)
        32
    """
    known = _touching.state_of(require_cell(cell)) is not None
    _tracking.adopt(cell)
    if not known:
        _tracking.watch(cell)  # also if it ran before
    return cell


def materialize(cell: nn.Cell) -> None:
    """Allocate every deferred parameter of a cell and of all below it now; nothing counts as used by that.

    Raises:
        TypeError: ``cell`` is no cell.
        UntouchedError: Layers in it wait for their sizes; nothing has been allocated then.
    """
    inside = require_cell(cell).cells_and_names()
    waiting = [name or type(inner).__name__ for name, inner in inside if waiting_layer(inner)]
    if waiting:
        raise UntouchedError(_WAITS.format(name=type(cell).__name__, layers=the_first(waiting)))
    for current in list(_touching.subtree(require_cell(cell))):
        for parameter in _touching.own_parameters(current) + _touching.hidden_parameters(current):
            _deferral.materialize(parameter)


def release(cell: nn.Cell) -> int:
    """Free the storage of the untouched parameters of a cell and of all below it.

    Nothing is lost: a released parameter is deferred, and comes back bit for bit when it is used. Values that no
    initializer can reproduce wait in an unnamed temporary file (in ``TMPDIR``).

    Args:
        cell: A `LazyCell`, or any cell that holds tracked ones.

    Returns:
        The number of bytes freed.

    Raises:
        TypeError: ``cell`` is no cell.
        LazyCellError: Nothing in it is tracked.
    """
    stores: list[_deferral.ValueStore] = []

    def store() -> _deferral.ValueStore:
        if not stores:
            stores.append(_deferral.ValueStore())
        return stores[0]

    freed = 0
    for current in list(_touching.subtree(require_tracked(cell))):
        if _touching.state_of(current) is not None:
            for parameter in _touching.own_parameters(current):
                if _tracking.can_be_released(parameter) and _deferral.drop(parameter, store):
                    freed += parameter.nbytes
    return freed


def optional(cell: C) -> C:
    """Declare that a cell may stay unused: neither it nor anything below it is warned of.

    Args:
        cell: Any cell.

    Returns:
        The same cell, so that it can be used in an assignment.

    Raises:
        TypeError: ``cell`` is no cell.
    """
    _tracking.adopt(require_cell(cell))
    _tracking.begin(cell).optional = True
    return cell
