"""Data parallelism: ranks that touch different layers, as branches on data make them do."""

from __future__ import annotations

from mindspore import nn

from lazycell import _mindspore as internals
from lazycell._live import parameters_in_order
from lazycell._registry import require_tracked
from lazycell._together import sync

__all__ = ["sync_touched"]


def sync_touched(net: nn.Cell) -> tuple[str, ...]:
    """Let what any rank has touched be touched on all ranks, with the same values.

    Under data parallelism each rank sees other data, and a branch that depends on data may lead each through other
    layers. All ranks call this before the first step, and at every step, in Python: before or after gradients are
    computed, or inside the function that is differentiated. From then on live lists, `lazycell.value_and_grad`,
    `lazycell.grad` and `lazycell.LazyOptimizer` hold the same parameters in the same order on all ranks. One that a
    rank hasn't reached contributes zeros; one that any rank has reached in a step is updated on all.

    Ranks that have built the net under one seed draw the same values by themselves. Otherwise those of rank 0 count,
    of what is there as of what is still to be drawn, and once more at the first touch. What a gradient was computed
    from before the first call isn't taken back; of layers that were added since the last call, gradients at differing
    values are an error.

    Where nothing has changed, a call costs one AllReduce of 400 bytes. Without communication, or with one process, it
    does nothing.

    Args:
        net: A `LazyCell`, or any cell that holds tracked ones; the same net on all ranks.

    Returns:
        The names of the parameters that are touched, and weren't at the last call on every rank; the same on all.

    Raises:
        TypeError: ``net`` is no cell.
        RuntimeError: It was compiled into a graph.
        LazyCellError: Nothing in it is tracked. Or, on all ranks: nets differ in names, shapes, dtypes or what is
            frozen; or a rank is computing gradients meanwhile.

    Example:
        >>> import lazycell, mindspore as ms
        >>> from lazycell.distributed import sync_touched
        >>> from mindspore import nn
        >>> net = lazycell.track(nn.CellList([nn.Dense(3, 1), nn.Dense(3, 1)]))
        >>> optimizer = lazycell.LazyOptimizer(nn.Momentum, net, 0.1, 0.9)
        >>> loss_and_grad = lazycell.value_and_grad(lambda x: net[int(x.sum() > 0)](x).sum(), None, net)
        >>> names = sync_touched(net)
        >>> loss, grads = loss_and_grad(ms.ops.ones((4, 3)))
        >>> names = sync_touched(net)
        >>> updated = optimizer(grads)
        >>> [p.name for p in grads.parameters]
        ['1.weight', '1.bias']
    """
    if internals.in_graph():
        raise RuntimeError(
            "sync_touched() can't be compiled into a graph: call it outside of functions that are jitted, or run in "
            "Graph mode, before or after gradients are computed."
        )
    return _sync(net)


def _sync(net: nn.Cell) -> tuple[str, ...]:
    require_tracked(net)
    if internals.num_ranks() == 1:
        return ()
    with internals.no_gradients():
        return sync(list(parameters_in_order(net)))
