"""Layers that infer their input size: the arguments of MindSpore's own, less the size that the first input gives."""

from __future__ import annotations

from typing import Any

from mindspore import nn

from lazycell import _sized_graphs  # noqa: F401  (has graphs compiled with known sizes)
from lazycell._errors import LazyCellError
from lazycell._sizing import LazyShapeMixin

__all__ = [
    "LazyDense",
    "LazyShapeMixin",
]


def _shape_of(layer: nn.Cell, x: Any, ranks: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a first input, if it is one that sizes can be taken from."""
    shape = tuple(getattr(x, "shape", ()))
    if len(shape) not in ranks and (ranks or not shape):
        wanted = " or ".join(map(str, ranks)) or "1 or more"
        given = f"one of shape {shape}" if hasattr(x, "shape") else type(x).__name__
        raise LazyCellError(
            f"{type(layer).__name__} takes {' and '.join(layer.sizes)} from its first input, a tensor with {wanted} "
            f"dimensions, but got {given}. It still waits for one."
        )
    return shape


class LazyDense(LazyShapeMixin, nn.Dense):  # type: ignore[misc]
    """``nn.Dense`` whose ``in_channels`` is the last dimension of the first input.

    Args:
        args, kwargs: Those of ``nn.Dense`` less ``in_channels``.

    Example:
        >>> import lazycell, mindspore as ms
        >>> layer = lazycell.layers.LazyDense(3)
        >>> layer
        LazyDense(in_channels=?, out_channels=3)
        >>> y = layer(ms.ops.ones((2, 5)))
        >>> layer
        Dense(input_channels=5, output_channels=3, has_bias=True)
    """

    sizes = ("in_channels",)

    def infer(self, x: Any) -> dict[str, Any]:
        """The last dimension."""
        return {"in_channels": _shape_of(self, x, ())[-1]}
