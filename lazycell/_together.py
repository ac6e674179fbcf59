"""What the ranks of a data-parallel run touch together, with which values, and what they have gradients of."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from lazycell import _deferral
from lazycell import _mindspore as internals
from lazycell import _ranks, _reading, _touching, _unsized
from lazycell._errors import LazyCellError
from lazycell._live import TouchedParameters, parameters_in_order

_UNEQUAL = """\
sync_touched() was given nets that differ from rank to rank: {details}. In data parallelism all ranks build the same \
net, and freeze the same layers of it. Where a shape is ?, give it on all ranks before: lazycell.dry_run(layer, \
inputs)."""

_GRADIENTS = """\
the ranks have gradients of different parameters; to reduce them hangs, or adds up what doesn't belong together: \
{details}. Call lazycell.distributed.sync_touched(net) on all ranks, before the first gradients and \
at every step; give gradient functions a live list, or the net; freeze the same layers on all ranks."""

_VALUES, _TOUCHED = 1, 2  # what agreed() says
_SEED, _DIGEST = 1, 2  # what _origin() begins with


def sync(listed: list[tuple[Parameter, bool]]) -> tuple[str, ...]:
    """Let what any rank has touched be touched on all, with the same values; see `lazycell.distributed`.

    Args:
        listed: All parameters of a net in order, each with whether its use can be tracked.

    Returns:
        The names of those whose values have been compared for the first time.

    Raises:
        LazyCellError: On all ranks, if the nets differ, or a rank does something else.
    """
    parameters = [parameter for parameter, _ in listed]
    touched = [_touching.is_touched(parameter) or not tracked for parameter, tracked in listed]
    described = _ranks.described(parameters)
    is_new = any(map(_is_new, parameters, touched))
    met = _ranks.meet("sync_touched()", "\n".join(described).encode(), bytes(touched), is_new)
    if not met.same:
        raise LazyCellError(_UNEQUAL.format(details=_ranks.differences(described)))
    if met.same_state and not met.flagged:
        return ()
    if not met.same_state:
        touched = _ranks.on_any(touched)
        _touch(parameters, touched)
    new = [p.name for p, is_touched in zip(parameters, touched) if is_touched and agreed(p) < _TOUCHED]
    _take_values(parameters, touched)
    return tuple(new)


def _broadcast(cell: nn.Cell) -> dict[str, Parameter]:
    """What MindSpore is to broadcast of a cell; seeds are shared before, for what has no storage on any rank."""
    if internals.num_ranks() > 1:
        with internals.no_gradients():
            sync(list(parameters_in_order(cell)))
    return _reading.with_storage(cell)


_reading.on_broadcast = _broadcast


def _touch(parameters: list[Parameter], touched: list[bool]) -> None:
    for parameter, is_touched in zip(parameters, touched):
        if is_touched:
            _touching.touch(parameter)


# ---------------------------------------------------------------------------------------------
# Gradients


@dataclass(frozen=True)
class Computed:
    """Gradients as one rank has them, or all."""

    parameters: list[Parameter]
    gradients: tuple[Any, ...]
    active: list[bool] | None

    def flags(self) -> list[bool]:
        """Which parameters took part; all, if nobody looked."""
        return [True] * len(self.parameters) if self.active is None else self.active


def of_all_ranks(own: Computed, live: TouchedParameters | None) -> Computed:
    """Gradients of the same parameters on all ranks, and which of these took part on any of them.

    Args:
        own: What this rank has computed.
        live: The live list that the parameters are from, if they are. Once its net has been through `sync`, what only
            another rank has reached is touched here, too, and has zeros.

    Raises:
        LazyCellError: On all ranks, if the parameters differ otherwise, or a rank does something else.
    """
    with internals.no_gradients():
        if live is not None and any(map(agreed, live.everything())):
            return _completed(own, live)
        met = _compare(own.parameters, own.flags())
        return own if met.same_state else replace(own, active=_ranks.on_any(own.flags()))


def refuse_differing(parameters: list[Parameter]) -> None:
    """Refuse reduced gradients that are of other parameters on other ranks.

    Raises:
        LazyCellError: On all ranks.
    """
    with internals.no_gradients():
        _compare(parameters, [], "updating parameters")


def _compare(parameters: list[Parameter], flags: list[bool], place: str = "computing gradients") -> _ranks.Meeting:
    described = _ranks.described(parameters)
    met = _ranks.meet(place, "\n".join(described).encode(), bytes(flags))
    if not met.same:
        raise LazyCellError(_GRADIENTS.format(details=_ranks.differences(described)))
    return met


def _completed(own: Computed, live: TouchedParameters) -> Computed:
    """Gradients of a net that all ranks are known to share, with zeros for what only others have reached."""
    everything = live.everything()
    place = {id(parameter): index for index, parameter in enumerate(own.parameters)}
    flags = own.flags()
    has = [id(parameter) in place for parameter in everything]
    active = [id(parameter) in place and flags[place[id(parameter)]] for parameter in everything]
    met = _compare(everything, [*has, *active])
    if met.same_state:
        return own
    union = _ranks.on_any([*has, *active])
    has, active = union[: len(everything)], union[len(everything) :]
    _touch(everything, has)
    listed = [(p, is_active) for p, is_listed, is_active in zip(everything, has, active) if is_listed]
    return Computed(
        [parameter for parameter, _ in listed],
        tuple(own.gradients[place[id(p)]] if id(p) in place else ops.zeros(p.shape, p.dtype) for p, _ in listed),
        [is_active for _, is_active in listed],
    )


# ---------------------------------------------------------------------------------------------
# Values


def agreed(parameter: Parameter) -> int:
    """What all ranks have in common of a parameter: its initial values, and that it is touched; 0 if nobody knows.

    What happens to values later is the same on all ranks, or, as with moving statistics, each rank's own.
    """
    return getattr(parameter, "_lazycell_agreed", 0)


def _is_new(parameter: Parameter, is_touched: bool) -> bool:
    if _unsized.is_unsized(parameter):  # there is nothing to compare yet
        return False
    return agreed(parameter) < (_TOUCHED if is_touched else _VALUES)


def _take_values(parameters: list[Parameter], touched: list[bool]) -> None:
    """Let values that differ, and seeds of those to come, be those of rank 0."""
    own = np.array([_origin(parameter) for parameter in parameters], np.int64)
    table = internals.gather_from_ranks(own.astype(np.uint32).view(np.int32))
    is_same = (table == table[0]).all(axis=(0, 2))
    all_seeds = (table[:, :, 0] == _SEED).all(axis=0)
    for index, (parameter, is_touched) in enumerate(zip(parameters, touched)):
        if not is_same[index] and all_seeds[index]:
            low, high = table[0, index, 1:].view(np.uint32).tolist()
            internals.set_seed_of(parameter, low | high << 32)
        elif not is_same[index]:
            _take_values_of_first(parameter)
        if not _unsized.is_unsized(parameter):
            parameter._lazycell_agreed = _TOUCHED if is_touched else max(agreed(parameter), _VALUES)


def _origin(parameter: Parameter) -> tuple[int, int, int]:
    """Where a parameter's values come from: its seed, if it has no storage yet, or a digest of the values."""
    if agreed(parameter) or _unsized.is_unsized(parameter):
        return 0, 0, 0
    seed = internals.seed_of(parameter) if _deferral.is_deferred(parameter) else None
    if seed is not None:
        return _SEED, seed & 0xFFFFFFFF, seed >> 32
    with _with_storage(parameter):
        digest = hashlib.blake2b(parameter.asnumpy().tobytes(), digest_size=8).digest()
    return _DIGEST, int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


@contextmanager
def _with_storage(parameter: Parameter) -> Iterator[None]:
    """Give a parameter storage, and let it be without again afterwards if it was; what it holds then, it keeps."""
    deferred = _deferral.is_deferred(parameter)
    _deferral.materialize(parameter)  # a mere read would count as a use, inside a forward pass
    yield
    if deferred:
        _deferral.drop(parameter, _deferral.ValueStore)


def _take_values_of_first(parameter: Parameter) -> None:
    with _with_storage(parameter):
        values = _ranks.values_of_first_rank(parameter.asnumpy())
        ops.assign(parameter, Tensor(values).astype(parameter.dtype))  # in place: graphs notice nothing else
