"""What the processes of a data-parallel run have in common: found out by one small AllReduce.

Each process is a rank. All ranks call the functions of this module together, and all come to the same conclusion.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

import numpy as np
from mindspore import Parameter

from lazycell import _mindspore as internals
from lazycell._errors import LazyCellError, the_first
from lazycell._unsized import is_unsized

_PLACES = """\
the ranks are not at the same place of the program: {places}. Each rank has to call sync_touched() and to compute \
gradients as often as the others, and in the same order."""

_DIGEST = 16  # digits of four bits, whose squares' sums stay exact over 74,000 ranks


@dataclass(frozen=True)
class Meeting:
    """What all ranks know after they have met.

    Attributes:
        same: Whether all have given the same description.
        same_state: Whether all have given the same state.
        flagged: Whether one at least has raised its flag.
    """

    same: bool
    same_state: bool
    flagged: bool


def meet(place: str, description: bytes, state: bytes, flag: bool = False) -> Meeting:
    """Compare what this rank gives with what the others give, by an AllReduce of some hundred bytes.

    Args:
        place: What this rank is doing, in words.
        description: Of what ``state`` is the state of.
        state: Any bytes.
        flag: Something that the others have to know.

    Raises:
        LazyCellError: On all ranks, if they aren't doing the same.
    """
    facts = [np.array(_digits(fact), np.int64) for fact in (place.encode(), description, state)]
    own = np.concatenate([*facts, *(fact * fact for fact in facts), [int(flag)]])
    summed = internals.sum_over_ranks(own)
    # Numbers are all equal if, and only if, the square of their sum is their count times the sum of their squares.
    sums, squares = summed[:-1].reshape(2, len(facts), _DIGEST)
    same_place, same, same_state = (squares * internals.num_ranks() == sums * sums).all(axis=1).tolist()
    if not same_place:
        raise LazyCellError(_PLACES.format(places=_by_rank(gather_texts(place))))
    return Meeting(same, same_state, bool(summed[-1]))


def _digits(fact: bytes) -> list[int]:
    digest = hashlib.blake2b(fact, digest_size=_DIGEST // 2).digest()
    return [digit for byte in digest for digit in (byte >> 4, byte & 15)]


def on_any(flags: list[bool]) -> list[bool]:
    """For each position whether the flag is set on any rank; all ranks have to give as many."""
    return [bool(count) for count in internals.sum_over_ranks(np.array(flags, np.int64))]


def gather_texts(text: str) -> list[str]:
    """A text of each rank, of any length."""
    data = text.encode()
    lengths = internals.gather_from_ranks(np.array([len(data)])).reshape(-1)
    longest = int(lengths.max()) + -int(lengths.max()) % 4
    padded = np.frombuffer(data.ljust(longest, b"\0"), np.int32)
    texts = internals.gather_from_ranks(padded)
    return [row.tobytes()[:length].decode() for row, length in zip(texts, lengths.tolist())]


def _by_rank(texts: list[str]) -> str:
    """What each rank says, those first that say the same."""
    ranks: dict[str, list[str]] = {}
    for rank, text in enumerate(texts):
        ranks.setdefault(text, []).append(str(rank))
    said = (f"rank {the_first(numbers)}: {text}" for text, numbers in ranks.items())
    return "; ".join(list(said)[:4])


def described(parameters: list[Parameter]) -> list[str]:
    """Parameters by name, shape and dtype, as ``"fc.weight (2, 3) Float32"``, and whether they are frozen."""
    flags = internals.trainable_flags(parameters)
    shapes = ["?" if is_unsized(parameter) else tuple(parameter.shape) for parameter in parameters]
    described = zip(parameters, shapes, flags)
    return [f"{p.name} {shape} {p.dtype}{'' if flag else ' frozen'}" for p, shape, flag in described]


def differences(own: list[str]) -> str:
    """What lists of descriptions, which differ from rank to rank, differ in."""
    lists: list[list[str]] = [json.loads(text) for text in gather_texts(json.dumps(own))]
    everything = list(dict.fromkeys(entry for entries in lists for entry in entries))
    names = {entry: entry.partition(" ")[0] for entry in everything}
    said = []
    for rank, entries in enumerate(lists):
        held = {names[entry]: entry for entry in entries}
        missing = [names[entry] for entry in everything if entry not in set(entries)]
        absent = [name for name in missing if name not in held]
        other = [held[name] for name in missing if name in held]
        said += [f"rank {rank} has no {the_first(absent)}"] if absent else []
        said += [f"rank {rank} has {the_first(other)}"] if other else []
    return "; ".join(said[:4]) or "they have them in different orders"


def values_of_first_rank(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """An array of rank 0; all ranks have to give one of the same shape and dtype."""
    data = internals.bytes_of_first_rank(np.ascontiguousarray(values).tobytes())
    return np.frombuffer(data, values.dtype).reshape(values.shape)
