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
from lazycell._errors import LazyCellError, the_first
from lazycell._live import TouchedParameters, parameters_in_order

_UNEQUAL = """\
sync_touched() was given nets that differ from rank to rank: {details}. In data parallelism all ranks build the same \
net, and freeze the same layers of it. Where a shape is ?, give it on all ranks before: lazycell.dry_run(layer, \
inputs)."""

_GRADIENTS = """\
the ranks have gradients of different parameters; to reduce them hangs, or adds up what doesn't belong together: \
{details}. Call lazycell.distributed.sync_touched(net) on all ranks, before the first gradients and \
at every step; give gradient functions a live list, or the net; freeze the same layers on all ranks."""

_OTHER_VALUES = """\
gradients were computed from values that differ from rank to rank: those of {names}, which were added, or got their \
size, since sync_touched() was last called. Build nets under the same seed on all ranks (mindspore.set_seed), or call \
sync_touched(net) when layers have been added, and before that lazycell.dry_run(net, inputs) where they infer their \
size."""

_SEEN, _VALUES, _TOUCHED = 1, 2, 3  # what agreed() says
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
    touched = _touching.are_used(listed)
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
    new = _ranks.on_any(list(map(_is_new, parameters, touched)))  # on one rank alone what that has put in anew
    if any(new):
        _take_values([(parameter, used) for parameter, used, counts in zip(parameters, touched, new) if counts])
    return tuple(p.name for p, is_touched, counts in zip(parameters, touched, new) if is_touched and counts)


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


def _compare(
    parameters: list[Parameter], flags: list[bool], place: str = "computing gradients", flag: bool = False
) -> _ranks.Meeting:
    described = _ranks.described(parameters)
    met = _ranks.meet(place, "\n".join(described).encode(), bytes(flags), flag)
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
    met = _compare(everything, [*has, *active], flag=any(agreed(p) < _VALUES for p in own.parameters))
    if not met.same_state:
        union = _ranks.on_any([*has, *active])
        has, active = union[: len(everything)], union[len(everything) :]
        _touch(everything, has)
    listed = [(p, is_active) for p, is_listed, is_active in zip(everything, has, active) if is_listed]
    if met.flagged:
        _refuse_other_values([parameter for parameter, _ in listed])
    if met.same_state:
        return own
    return Computed(
        [parameter for parameter, _ in listed],
        tuple(own.gradients[place[id(p)]] if id(p) in place else ops.zeros(p.shape, p.dtype) for p, _ in listed),
        [is_active for _, is_active in listed],
    )


def _refuse_other_values(parameters: list[Parameter]) -> None:
    """Refuse gradients computed from values that ranks have drawn for themselves since the last `sync`."""
    new = _ranks.on_any([agreed(parameter) < _VALUES for parameter in parameters])
    fresh = [parameter for parameter, counts in zip(parameters, new) if counts]
    table = _gathered([_digest(parameter) for parameter in fresh])
    other = [p.name for p, is_same in zip(fresh, (table == table[0]).all(axis=(0, 2))) if not is_same]
    if other:
        raise LazyCellError(_OTHER_VALUES.format(names=the_first(other)))
    for parameter in fresh:
        parameter._lazycell_agreed = max(agreed(parameter), _VALUES)


# ---------------------------------------------------------------------------------------------
# Values


def agreed(parameter: Parameter) -> int:
    """What all ranks have in common of a parameter, at least; 0 if nobody knows.

    That it is there (``_SEEN``: its shape isn't known yet), its initial values (``_VALUES``), and that it is touched.
    What happens to values later is the same on all ranks, or, as with moving statistics, each rank's own.
    """
    return getattr(parameter, "_lazycell_agreed", 0)


def _to_agree_on(parameter: Parameter, is_touched: bool) -> int:
    """What ranks can have in common of a parameter as it is now."""
    if _unsized.is_unsized(parameter):
        return _SEEN
    return _TOUCHED if is_touched else _VALUES


def _is_new(parameter: Parameter, is_touched: bool) -> bool:
    return agreed(parameter) < _to_agree_on(parameter, is_touched)


def _take_values(new: list[tuple[Parameter, bool]]) -> None:
    """Let values that differ, and seeds of those to come, be those of rank 0.

    Args:
        new: The same parameters on all ranks, each with whether it is touched.
    """
    table = _gathered([_origin(parameter) for parameter, _ in new])
    is_same = (table == table[0]).all(axis=(0, 2))
    all_seeds = (table[:, :, 0] == _SEED).all(axis=0)
    for index, (parameter, is_touched) in enumerate(new):
        if not is_same[index] and all_seeds[index]:
            low, high = table[0, index, 1:].view(np.uint32).tolist()
            internals.set_seed_of(parameter, low | high << 32)
        elif not is_same[index]:
            _take_values_of_first(parameter)
        parameter._lazycell_agreed = max(agreed(parameter), _to_agree_on(parameter, is_touched))


def _gathered(origins: list[tuple[int, int, int]]) -> np.ndarray[Any, Any]:
    """What each rank gives: an array of ranks, parameters, and three numbers."""
    own = np.array(origins, np.int64).reshape(-1, 3)
    return internals.gather_from_ranks(own.astype(np.uint32).view(np.int32))


def _origin(parameter: Parameter) -> tuple[int, int, int]:
    """Where a parameter's values come from: its seed, if it has no storage yet, or a digest of the values.

    What ranks have agreed on may have been assigned anew before its first touch. Moving statistics, which no gradient
    is asked for, may have moved, and are each rank's own.
    """
    if _unsized.is_unsized(parameter) or (agreed(parameter) >= _VALUES and not parameter.requires_grad):
        return 0, 0, 0
    seed = internals.seed_of(parameter) if _deferral.is_deferred(parameter) else None
    return _digest(parameter) if seed is None else (_SEED, seed & 0xFFFFFFFF, seed >> 32)


def _digest(parameter: Parameter) -> tuple[int, int, int]:
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
