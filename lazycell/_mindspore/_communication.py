"""Communication between the processes of a data-parallel run; nothing of it is asked for in a single process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mindspore
import numpy as np
from mindspore import Tensor, ops
from mindspore.communication import GlobalComm, get_group_size, get_rank

from lazycell._errors import LazyCellError

_DATA_PARALLEL = ("data_parallel", "hybrid_parallel")
_COLLECTIVES = ("AllReduce", "AllGather", "Broadcast")

_LOST = """\
rank {rank} has waited for the other ranks in vain: one of them has ended, hangs, or takes longer than MindSpore \
waits. Look into the logs of the others for what came first."""


def num_ranks() -> int:
    """How many processes there are; 1 before ``mindspore.communication.init()``."""
    return int(get_group_size()) if GlobalComm.INITED else 1


def in_data_parallel() -> bool:
    """Whether there are several processes, each with a part of the batch."""
    if not GlobalComm.INITED or get_group_size() == 1:
        return False
    return mindspore.get_auto_parallel_context("parallel_mode") in _DATA_PARALLEL


# Each is computed on the device that is set, with the dtypes that all backends know. All ranks have to call them.


def sum_over_ranks(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The sum of a vector over all ranks; exact for integers, if no sum exceeds 2 ** 24."""
    return _run(ops.AllReduce(), values.astype(np.float32)).astype(np.int64)


def gather_from_ranks(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """An array of 32 bit integers of each rank, along a new first axis."""
    return _run(ops.AllGather(), values.astype(np.int32)).reshape(-1, *values.shape)


def bytes_of_first_rank(data: bytes) -> bytes:
    """What rank 0 gives; all ranks have to give as much."""
    broadcast = ops.Broadcast(0)
    padded = np.frombuffer(data + bytes(-len(data) % 4), np.int32)
    return _run(lambda tensor: broadcast((tensor,))[0], padded).tobytes()[: len(data)]


def _run(collective: Callable[[Tensor], Tensor], values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    try:
        return np.asarray(collective(Tensor(values)).asnumpy())
    except RuntimeError as error:
        if any(name in str(error) for name in _COLLECTIVES):  # others come from operators that failed before
            raise LazyCellError(_LOST.format(rank=get_rank())) from error
        raise
