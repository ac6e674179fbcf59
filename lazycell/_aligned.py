"""Gradients that know their parameters, and who is told which of them took part in a step."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, Protocol

from mindspore import Parameter, Tensor, ops

from lazycell._errors import LazyCellError
from lazycell._touching import now


class Gradients(tuple[Any, ...]):
    """A tuple of gradients that know their parameters; what `value_and_grad` and `grad` return for a list of weights.

    Attributes:
        parameters: The parameters, one for each gradient.
        active: For each, whether a gradient has arrived at it; the others hold zeros. All True unless a `LazyOptimizer`
            exists that wants to know.
    """

    __module__ = "lazycell"
    parameters: tuple[Parameter, ...]
    active: tuple[bool, ...]
    made_at: int  # in the order of touches
    as_computed = False  # by MindSpore, so that shapes fit

    def __new__(
        cls,
        gradients: Iterable[Any],
        parameters: Iterable[Parameter],
        active: Iterable[bool] | None = None,
        made_at: int | None = None,
    ) -> Gradients:
        made = super().__new__(cls, gradients)
        made.made_at = now() if made_at is None else made_at
        made.parameters = tuple(parameters)
        made.active = (True,) * len(made) if active is None else tuple(active)
        if not len(made) == len(made.parameters) == len(made.active):
            raise LazyCellError(
                f"{len(made)} gradients were given for {len(made.parameters)} parameters: there must be one for each."
            )
        return made

    def replace(self, gradients: Iterable[Any]) -> Gradients:
        """Other values for the same parameters, as after clipping or scaling.

        Args:
            gradients: One for each of `parameters`.

        Raises:
            LazyCellError: They are more or fewer.

        Example:
            >>> import lazycell, mindspore as ms
            >>> from mindspore import nn
            >>> net = lazycell.track(nn.Dense(3, 2))
            >>> grads = lazycell.grad(net, None, net)(ms.ops.ones((4, 3)))
            >>> grads = grads.replace(ms.ops.clip_by_global_norm(grads, 1.0))
            >>> [p.name for p in grads.parameters]
            ['weight', 'bias']
        """
        return Gradients(gradients, self.parameters, self.active, self.made_at)

    def add(self, other: Gradients) -> Gradients:
        """The sum of two, parameter by parameter; what only one of them has counts as it is.

        So steps with different active branches can be accumulated.

        Args:
            other: Gradients of the same net, of a later step.
        """
        position = {id(parameter): index for index, parameter in enumerate(self.parameters)}
        gradients, parameters, active = list(self), list(self.parameters), list(self.active)
        for parameter, gradient, reached in zip(other.parameters, other, other.active):
            index = position.get(id(parameter))
            if index is None:
                parameters.append(parameter)
                gradients.append(gradient)
                active.append(reached)
            elif reached:
                gradients[index] = gradients[index] + gradient if active[index] else gradient
                active[index] = True
        return Gradients(gradients, parameters, active, max(self.made_at, other.made_at))

    def __deepcopy__(self, memo: dict[int, Any]) -> Gradients:
        return self.replace(gradient.copy() for gradient in self)

    def __reduce__(self) -> Any:
        return tuple, (tuple(self),)


class Participant(Protocol):
    """Someone who wants to know which parameters took part in a step; held weakly."""

    def took_part(self, gradients: Gradients) -> None: ...


participants: weakref.WeakSet[Participant] = weakref.WeakSet()


def are_nonzero(gradients: list[Any]) -> list[bool]:
    """Whether each of some gradients has an element that isn't zero; sparse ones count as such."""
    dense = [index for index, gradient in enumerate(gradients) if isinstance(gradient, Tensor)]
    answers = [True] * len(gradients)
    if dense:
        found = ops.stack([(gradients[index] != 0).any() for index in dense]).asnumpy()
        for index, is_nonzero in zip(dense, found):
            answers[index] = bool(is_nonzero)
    return answers
