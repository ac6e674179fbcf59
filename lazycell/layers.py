"""Layers that infer their input size: the arguments of MindSpore's own, less the size that the first input gives.

Until then their parameters have names and no shapes. Afterwards they are MindSpore's layers: class, attributes,
``repr``, speed, and the initial values that these would have had in the same place under the same seed.
"""

from __future__ import annotations

import inspect
from typing import Any

from mindspore import Tensor, nn

from lazycell import _mindspore as internals
from lazycell import _sized_graphs  # noqa: F401  (has graphs compiled with known sizes)
from lazycell._errors import LazyCellError
from lazycell._sizing import WaitingLayer, signature_of

__all__ = [
    "LazyBatchNorm1d",
    "LazyBatchNorm2d",
    "LazyBatchNorm3d",
    "LazyConv1d",
    "LazyConv1dTranspose",
    "LazyConv2d",
    "LazyConv2dTranspose",
    "LazyConv3d",
    "LazyConv3dTranspose",
    "LazyDense",
    "LazyLayerNorm",
    "LazyShapeMixin",
]


class LazyShapeMixin:
    """Makes a lazy layer of an eager one: it infers arguments of ``__init__`` from its first input.

    List it before the eager class, say in ``sizes`` which arguments are inferred, and in ``infer`` how. The layer
    takes the other arguments. Until the first input, a dry run or a checkpoint tells the sizes, its parameters have a
    name and no shape; then it becomes an instance of the eager class, with the initial values that this would have
    had in its place.

    Attributes:
        sizes: Names of the arguments of the eager class's ``__init__`` that are inferred.

    Example:
        >>> import lazycell, mindspore as ms
        >>> from mindspore import nn
        >>> class Scale(nn.Cell):
        ...     def __init__(self, channels, init="ones"):
        ...         super().__init__()
        ...         self.factor = ms.Parameter(ms.common.initializer.initializer(init, (channels,)), name="factor")
        ...     def construct(self, x):
        ...         return x * self.factor
        >>> class LazyScale(lazycell.layers.LazyShapeMixin, Scale):
        ...     sizes = ("channels",)
        ...     def infer(self, x):
        ...         return {"channels": x.shape[-1]}
        >>> layer = LazyScale()
        >>> layer
        LazyScale(channels=?)
        >>> y = layer(ms.ops.ones((2, 5)))
        >>> type(layer) is Scale, layer.factor.shape
        (True, (5,))
    """

    sizes: tuple[str, ...] = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        eager = _eager_class(cls)
        if eager is not None:
            _refuse_lost(cls, eager)
        if eager is not None and "__init__" not in vars(cls):
            kept = [p for p in signature_of(eager).parameters.values() if p.name not in cls.sizes]
            cls.__signature__ = inspect.Signature(kept)  # type: ignore[attr-defined]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        internals.require_known_internals()
        cell: Any = self
        eager = _eager_class(type(self))
        if eager is None or not self.sizes:
            raise TypeError(f"{type(self).__name__} must name an eager layer after LazyShapeMixin, and its sizes.")
        signature = signature_of(eager)
        unknown = [name for name in self.sizes if name not in signature.parameters]
        if unknown:
            raise TypeError(
                f"{eager.__name__}.__init__() has no argument named {' or '.join(unknown)}, of which "
                f"{type(self).__name__} says that it is inferred; its arguments are {signature}."
            )
        kept = [p for p in signature.parameters.values() if p.name not in self.sizes]
        arguments = dict(inspect.Signature(kept).bind(*args, **kwargs).arguments)
        WaitingLayer.begin(cell, type(self), eager, arguments)

    def infer(self, *inputs: Any, **kwargs: Any) -> dict[str, Any]:
        """The sizes, by name, that the first inputs of ``construct`` tell; raise an error if these can't be right."""
        name, sizes = type(self).__name__, ", ".join(self.sizes)
        raise NotImplementedError(f"{name} must say how it infers {sizes}: define infer().")

    def infer_from_parameter(self, name: str, shape: tuple[int, ...]) -> dict[str, Any] | None:
        """The sizes that the shape of a loaded parameter tells; None to have them found out.

        They are found if each dimension is a size times something, plus something.
        """
        return None

    @classmethod
    def nominal(cls, arguments: dict[str, Any]) -> dict[str, Any]:
        """Sizes with which the layer can be built as long as nobody knows them; 1, unless a class says otherwise."""
        return dict.fromkeys(cls.sizes, 1)


def _eager_class(cls: type) -> Any:
    """The class that a lazy layer becomes: the one that follows the mixin."""
    order = cls.__mro__
    following = order[order.index(LazyShapeMixin) + 1]
    return following if issubclass(following, nn.Cell) else None


def _refuse_lost(cls: type, eager: type) -> None:
    """Refuse what an instance would do differently only until it becomes one of the eager class."""
    own = cls.__mro__[: cls.__mro__.index(LazyShapeMixin)]
    names = {name for base in own for name in vars(base) if not name.startswith("__") or name == "__call__"}
    lost = sorted(name for name in names - set(vars(LazyShapeMixin)) if hasattr(eager, name))
    if lost:
        raise TypeError(
            f"{cls.__name__} defines {', '.join(lost)}, which is lost once a layer becomes {eager.__name__}. Define it "
            f"in a subclass of {eager.__name__}, and list that after LazyShapeMixin."
        )


def _shape_of(layer: Any, x: Any, ranks: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a first input, if it has one of the numbers of dimensions that the layer takes."""
    shape = tuple(x.shape) if isinstance(x, Tensor) else ()
    if len(shape) not in ranks:
        numbers = f"{ranks[0]} or more" if len(ranks) > 2 else " or ".join(map(str, ranks))
        given = f"one of shape {shape}" if isinstance(x, Tensor) else type(x).__name__
        raise LazyCellError(
            f"{type(layer).__name__} takes {' and '.join(layer.sizes)} from its first input, a tensor with {numbers} "
            f"dimensions, but got {given}. It still waits for one."
        )
    return shape


_ANY_RANK = tuple(range(1, 100))


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
        return {"in_channels": _shape_of(self, x, _ANY_RANK)[-1]}

    @classmethod
    def nominal(cls, arguments: dict[str, Any]) -> dict[str, Any]:
        """What a tensor given for ``weight_init`` asks for."""
        weight = arguments.get("weight_init")
        return {"in_channels": weight.shape[-1] if isinstance(weight, Tensor) and weight.ndim else 1}


class _Channels(LazyShapeMixin):
    """Takes the number of channels from the first input."""

    _size = "in_channels"
    _ranks: tuple[int, ...] = ()
    _axis_of_weight = 1

    def infer(self, x: Any) -> dict[str, Any]:
        """The dimension that ``data_format`` names C."""
        layout = getattr(self, "data_format", getattr(self, "format", ""))
        return {self._size: _shape_of(self, x, self._ranks)[-1 if layout == "NHWC" else 1]}


class _Convolution(_Channels):
    sizes = ("in_channels",)

    @classmethod
    def nominal(cls, arguments: dict[str, Any]) -> dict[str, Any]:
        """As many as there are groups, or what a tensor given for ``weight_init`` asks for."""
        weight, group = arguments.get("weight_init"), arguments.get("group", 1)
        if not isinstance(weight, Tensor) or weight.ndim < 2:
            return {"in_channels": group}
        axis = -1 if arguments.get("data_format") == "NHWC" else 1
        return {"in_channels": weight.shape[axis] * group}


class _Transposed(_Convolution):
    @classmethod
    def nominal(cls, arguments: dict[str, Any]) -> dict[str, Any]:
        """As many as there are groups, or what a tensor given for ``weight_init`` asks for."""
        weight = arguments.get("weight_init")
        if not isinstance(weight, Tensor) or not weight.ndim:
            return {"in_channels": arguments.get("group", 1)}
        return {"in_channels": weight.shape[0]}


class LazyConv1d(_Convolution, nn.Conv1d):  # type: ignore[misc]
    """``nn.Conv1d`` whose ``in_channels`` is dimension 1 of the first input.

    Args:
        args, kwargs: Those of ``nn.Conv1d`` less ``in_channels``.

    Example:
        >>> import lazycell, mindspore as ms
        >>> layer = lazycell.layers.LazyConv1d(8, kernel_size=3)
        >>> layer(ms.ops.ones((2, 5, 10))).shape, layer.in_channels
        ((2, 8, 10), 5)
    """

    _ranks = (3,)


class LazyConv2d(_Convolution, nn.Conv2d):  # type: ignore[misc]
    """``nn.Conv2d`` whose ``in_channels`` is the dimension of the first input that ``data_format`` names C.

    Args:
        args, kwargs: Those of ``nn.Conv2d`` less ``in_channels``.

    Example:
        >>> import lazycell
        >>> layer = lazycell.layers.LazyConv2d(8, kernel_size=3)
        >>> lazycell.dry_run(layer, lazycell.spec(16, 3, 32, 32))
        spec(16, 8, 32, 32, dtype=Float32)
        >>> layer.weight.shape
        (8, 3, 3, 3)
    """

    _ranks = (4,)


class LazyConv3d(_Convolution, nn.Conv3d):  # type: ignore[misc]
    """``nn.Conv3d`` whose ``in_channels`` is dimension 1 of the first input.

    Args:
        args, kwargs: Those of ``nn.Conv3d`` less ``in_channels``.

    Example:
        >>> import lazycell, mindspore as ms
        >>> layer = lazycell.layers.LazyConv3d(4, kernel_size=1)
        >>> layer(ms.ops.ones((1, 2, 3, 3, 3))).shape, layer.in_channels
        ((1, 4, 3, 3, 3), 2)
    """

    _ranks = (5,)


class LazyConv1dTranspose(_Transposed, nn.Conv1dTranspose):  # type: ignore[misc]
    """``nn.Conv1dTranspose`` whose ``in_channels`` is dimension 1 of the first input.

    Args:
        args, kwargs: Those of ``nn.Conv1dTranspose`` less ``in_channels``.

    Example:
        >>> import lazycell, mindspore as ms
        >>> layer = lazycell.layers.LazyConv1dTranspose(8, kernel_size=3)
        >>> layer(ms.ops.ones((2, 5, 10))).shape, layer.in_channels
        ((2, 8, 10), 5)
    """

    _ranks = (3,)


class LazyConv2dTranspose(_Transposed, nn.Conv2dTranspose):  # type: ignore[misc]
    """``nn.Conv2dTranspose`` whose ``in_channels`` is dimension 1 of the first input.

    Args:
        args, kwargs: Those of ``nn.Conv2dTranspose`` less ``in_channels``.

    Example:
        >>> import lazycell, mindspore as ms
        >>> layer = lazycell.layers.LazyConv2dTranspose(8, kernel_size=3)
        >>> layer(ms.ops.ones((2, 5, 6, 6))).shape, layer.in_channels
        ((2, 8, 6, 6), 5)
    """

    _ranks = (4,)


class LazyConv3dTranspose(_Transposed, nn.Conv3dTranspose):  # type: ignore[misc]
    """``nn.Conv3dTranspose`` whose ``in_channels`` is dimension 1 of the first input.

    Args:
        args, kwargs: Those of ``nn.Conv3dTranspose`` less ``in_channels``.

    Example:
        >>> import lazycell
        >>> layer = lazycell.layers.LazyConv3dTranspose(4, kernel_size=1)
        >>> layer
        LazyConv3dTranspose(in_channels=?, out_channels=4, kernel_size=1)
    """

    _ranks = (5,)


class _Normalization(_Channels):
    sizes = ("num_features",)
    _size = "num_features"

    @classmethod
    def nominal(cls, arguments: dict[str, Any]) -> dict[str, Any]:
        """1, or what a tensor given for an initial value asks for."""
        tensors = (value for value in arguments.values() if isinstance(value, Tensor) and value.ndim)
        return {"num_features": next((tensor.shape[0] for tensor in tensors), 1)}


class LazyBatchNorm1d(_Normalization, nn.BatchNorm1d):  # type: ignore[misc]
    """``nn.BatchNorm1d`` whose ``num_features`` is dimension 1 of the first input.

    Args:
        args, kwargs: Those of ``nn.BatchNorm1d`` less ``num_features``.

    Example:
        >>> import lazycell, mindspore as ms
        >>> layer = lazycell.layers.LazyBatchNorm1d(momentum=0.5)
        >>> y = layer(ms.ops.ones((2, 5)))
        >>> layer.num_features
        5
    """

    _ranks = (2, 3)


class LazyBatchNorm2d(_Normalization, nn.BatchNorm2d):  # type: ignore[misc]
    """``nn.BatchNorm2d`` whose ``num_features`` is the dimension of the first input that ``data_format`` names C.

    Args:
        args, kwargs: Those of ``nn.BatchNorm2d`` less ``num_features``.

    Example:
        >>> import lazycell, mindspore as ms
        >>> layer = lazycell.layers.LazyBatchNorm2d()
        >>> y = layer(ms.ops.ones((2, 5, 3, 3)))
        >>> layer.num_features
        5
    """

    _ranks = (4,)


class LazyBatchNorm3d(_Normalization, nn.BatchNorm3d):  # type: ignore[misc]
    """``nn.BatchNorm3d`` whose ``num_features`` is dimension 1 of the first input.

    Args:
        args, kwargs: Those of ``nn.BatchNorm3d`` less ``num_features``.

    Example:
        >>> import lazycell, mindspore as ms
        >>> layer = lazycell.layers.LazyBatchNorm3d()
        >>> y = layer(ms.ops.ones((2, 5, 3, 3, 3)))
        >>> layer.bn2d.num_features
        5
    """

    _ranks = (5,)


class LazyLayerNorm(LazyShapeMixin, nn.LayerNorm):  # type: ignore[misc]
    """``nn.LayerNorm`` whose ``normalized_shape`` is that of the first input from ``begin_params_axis`` on.

    Args:
        args, kwargs: Those of ``nn.LayerNorm`` less ``normalized_shape``. By default the last dimension alone is
            normalized; for all but the first, ``begin_norm_axis`` and ``begin_params_axis`` are both 1.

    Example:
        >>> import lazycell, mindspore as ms
        >>> layer = lazycell.layers.LazyLayerNorm(begin_norm_axis=1, begin_params_axis=1)
        >>> y = layer(ms.ops.ones((2, 5, 3)))
        >>> layer.normalized_shape
        (5, 3)
    """

    sizes = ("normalized_shape",)

    def infer(self, x: Any) -> dict[str, Any]:
        """The dimensions from ``begin_params_axis`` on."""
        axis = self.begin_params_axis
        least = max(1, -axis, axis + 1)
        return {"normalized_shape": _shape_of(self, x, _ANY_RANK[least - 1 :])[axis:]}

    def infer_from_parameter(self, name: str, shape: tuple[int, ...]) -> dict[str, Any] | None:
        """The parameters have this very shape."""
        return {"normalized_shape": shape}

    @classmethod
    def nominal(cls, arguments: dict[str, Any]) -> dict[str, Any]:
        """One dimension of 1, or what a tensor given for an initial value asks for."""
        tensors = (value for value in arguments.values() if isinstance(value, Tensor) and value.ndim)
        return {"normalized_shape": next((tuple(tensor.shape) for tensor in tensors), (1,))}
