"""Gradients that follow what is used and trainable."""

from __future__ import annotations

import functools
import inspect
import logging
import sys
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from itertools import compress
from typing import Any

import mindspore
from mindspore import Parameter, ParameterTuple, nn, ops

from lazycell import _deferral
from lazycell import _mindspore as internals
from lazycell import _reading, _touching
from lazycell._aligned import Gradients, are_nonzero, participants
from lazycell._dry_run import touch_by, within
from lazycell._errors import LazyCellError, UntouchedError, the_first
from lazycell._history import History
from lazycell._live import TouchedParameters
from lazycell._together import Computed, of_all_ranks
from lazycell._unsized import is_unsized

_log = logging.getLogger("lazycell")
NATIVE_GRAD, NATIVE_VALUE_AND_GRAD = mindspore.grad, mindspore.value_and_grad  # whatever patch() puts in their place

_FROZEN = """\
value_and_grad() and grad() were given frozen parameters in weights, for which MindSpore gives zeros instead of \
gradients: {names}. Leave them out (trainable_params() does), or call lazycell.unfreeze()."""

_EMPTY = """\
there is nothing to compute gradients for: {why}. Give value_and_grad() or grad() parameters that the function uses, \
and that require a gradient."""

_KINDS = "weights must be a live list, a cell, a parameter, or a list of parameters, but is {kind}."


def value_and_grad(
    fn: Callable[..., Any],
    grad_position: int | tuple[int, ...] | None = 0,
    weights: Any = None,
    has_aux: bool = False,
    return_ids: bool = False,
    sens_param: bool = False,
) -> Callable[..., Any]:
    """``mindspore.value_and_grad``, whose cost follows what is used and trainable.

    Frozen layers before the first trainable one are neither recorded nor kept in memory, in PyNative mode as in Graph
    mode. Results are bit-identical to MindSpore's.

    Args:
        fn: The function or cell to differentiate.
        grad_position: As in MindSpore; None for no gradient of an input.
        weights: What to compute gradients for: a live list, read anew at each call, after the forward pass; a cell,
            for its touched trainable parameters; or what MindSpore takes: a parameter, a list, a ``ParameterTuple``.
        has_aux: As in MindSpore.
        return_ids: As in MindSpore.
        sens_param: As in MindSpore.

    Returns:
        A function of the arguments of ``fn``. It returns what MindSpore's returns; the gradients of a list of weights
        are a tuple with an attribute ``parameters``, one for each.

    Raises:
        ValueError: ``grad_position`` and ``weights`` are both None.
        TypeError: ``weights`` is none of these.
        LazyCellError: By the function, before anything is differentiated: a weight is frozen, or there is none at all.
            In data parallelism also afterwards, on all ranks: others have gradients of other parameters; see
            `lazycell.distributed.sync_touched`.
        UntouchedError: By the function: nothing of a live list or a cell was touched.

    Example:
        >>> import lazycell, mindspore as ms
        >>> from mindspore import nn
        >>> net = lazycell.track(nn.SequentialCell(nn.Dense(3, 2), nn.Dense(2, 1)))
        >>> lazycell.freeze(net[0])
        2
        >>> loss_and_grad = lazycell.value_and_grad(lambda x: net(x).sum(), None, net)
        >>> loss, grads = loss_and_grad(ms.ops.ones((4, 3)))
        >>> [p.name for p in grads.parameters]
        ['1.weight', '1.bias']
    """
    return _function(_GradientFunction(fn, grad_position, weights, True, has_aux, return_ids, sens_param))


def grad(
    fn: Callable[..., Any],
    grad_position: int | tuple[int, ...] | None = 0,
    weights: Any = None,
    has_aux: bool = False,
    return_ids: bool = False,
    sens_param: bool = False,
) -> Callable[..., Any]:
    """``mindspore.grad``, whose cost follows what is used and trainable; see `value_and_grad`."""
    return _function(_GradientFunction(fn, grad_position, weights, False, has_aux, return_ids, sens_param))


def as_mindspore_takes_them(native: Callable[..., Any]) -> Callable[..., Any]:
    """`grad` or `value_and_grad` for code that was written for MindSpore's: it may name frozen parameters, or none.

    Args:
        native: ``mindspore.grad`` or ``mindspore.value_and_grad``.
    """
    signature = inspect.signature(value_and_grad)

    def function(*args: Any, **kwargs: Any) -> Callable[..., Any]:
        try:
            given = signature.bind(*args, **kwargs)
        except TypeError:
            return native(*args, **kwargs)  # type: ignore[no-any-return]  # raises its own
        given.apply_defaults()
        fn, grad_position, weights, has_aux, return_ids, sens_param = given.args
        is_live = isinstance(weights, TouchedParameters)
        many = weights if not is_live and isinstance(weights, (list, tuple)) and weights else [weights]
        if not (is_live or all(isinstance(weight, Parameter) for weight in many)):
            return native(*args, **kwargs)  # type: ignore[no-any-return]
        get_value = native is NATIVE_VALUE_AND_GRAD
        flags = has_aux, return_ids, sens_param, True
        return _function(_GradientFunction(fn, grad_position, weights, get_value, *flags))

    return function


def _function(gradient: _GradientFunction) -> Callable[..., Any]:
    """A plain function, which can be decorated by ``mindspore.jit`` and called in graphs, as MindSpore's own can."""

    def gradient_function(*args, **kwargs):  # type: ignore[no-untyped-def]  # MindSpore's compiler parses this
        return gradient(*args, **kwargs)

    return gradient_function


class _Call:
    """What calling a gradient function means: in Python one thing, for MindSpore's compiler another."""

    def __get__(self, gradient: _GradientFunction | None, owner: type) -> Any:
        if gradient is None:
            return self
        if internals.parser_asks(sys._getframe().f_back):
            return gradient.in_compilation()
        return gradient.call


class _GradientFunction:
    """What `value_and_grad` and `grad` return functions of."""

    __ms_class__ = True  # lets MindSpore's compiler ask for __call__
    __call__ = _Call()

    def __init__(
        self,
        fn: Callable[..., Any],
        grad_position: int | tuple[int, ...] | None,
        weights: Any,
        get_value: bool,
        has_aux: bool,
        return_ids: bool,
        sens_param: bool,
        takes_frozen: bool = False,
    ) -> None:
        self._fn = fn
        self._takes_frozen = takes_frozen  # and gives zeros for them, as MindSpore does
        self._get_value = get_value
        self._by_position = grad_position is not None
        self._has_aux, self._return_ids, self._sens_param = has_aux, return_ids, sens_param
        self._weights = _understood(weights)
        make = NATIVE_VALUE_AND_GRAD if get_value else NATIVE_GRAD
        optional = {"sens_param": True} if sens_param else {}  # MindSpore 2.8 and later
        self._native = functools.partial(
            make, grad_position=grad_position, has_aux=has_aux, return_ids=return_ids, **optional
        )
        self._native(fn, weights=None if weights is None else [])  # refuses what MindSpore refuses
        self._layers: list[list[Parameter]] | None
        self._roots: list[weakref.ref[nn.Cell]]
        self._parameters: list[Parameter]
        self._flags: list[bool] | None
        self._look_again()
        self._frozen = False
        self._version = -1, -1, False
        self._compiled: tuple[list[int], Callable[..., Any]] | None = None
        self._in_graphs = _InGraphs()
        self._history = History()
        self._has_run = False

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Compute values and gradients, in the mode that is set."""
        if self._weights is None:
            return self._native(self._fn, weights=None)(*args, **kwargs)
        if not isinstance(self._weights, TouchedParameters):
            self._refuse_unfit()
        if internals.in_graph_mode():
            internals.end_forgotten_recording()
            return self._in_graph(args, kwargs)
        with internals.recording_ended():
            return self._in_python(args, kwargs)

    # In PyNative mode

    def _in_python(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Let MindSpore run the function; which weights there are is looked up when it has run."""
        if isinstance(self._fn, nn.Cell) and not self._has_aux and internals.may_have_run(self._fn, args, kwargs):
            self._fill_given()
            result = self._native(self._fn, weights=self._weights)(*args, **kwargs)  # it takes the pass that has run
            return self._with_parameters(result, self._now(), None)
        everything: list[Parameter] = []
        weights: list[Parameter] = []  # without those that were given and have no storage: their gradients are zeros
        listed = isinstance(self._weights, (list, tuple))
        wanted = listed and (participants or not self._has_run) and not internals.gradient_running()
        reached = internals.Reached() if wanted else None

        def forward(*inputs: Any, **named: Any) -> Any:
            outputs = self._fn(*inputs, **named)
            everything[:] = self._now()
            weights[:] = self._with_storage(everything)
            if reached is not None:
                reached.watch(weights[:])
                weights.insert(0, reached.border)
            return outputs

        given: Any = weights if listed else self._weights
        active = None
        try:
            can, taken = self._captured(args, kwargs)
            if can:
                result = self._run_captured(forward, given, *taken)
            else:
                result = self._native(forward, weights=given)(*args, **kwargs)
        finally:
            if reached is not None:
                active = reached.end()
        self._has_run = True
        if reached is not None:
            result = self._without_first(result)
            del weights[0]
        return self._for_all(result, weights, everything if listed else weights, active)

    def _fill_given(self) -> None:
        """Give storage to the weights that the user listed, used or not: MindSpore is about to be given them."""
        if not isinstance(self._weights, TouchedParameters):
            for parameter in _deferral.deferred_among(_listed(self._weights)):
                _deferral.materialize(parameter)

    def _with_storage(self, weights: list[Parameter]) -> list[Parameter]:
        """Which weights to differentiate by; at least one."""
        deferred = _deferral.deferred_among(weights)
        if len(deferred) == len(weights) or self._return_ids:
            for parameter in deferred:
                _deferral.materialize(parameter)
            return weights[:]
        return [parameter for parameter in weights if not _deferral.is_deferred(parameter)] if deferred else weights[:]

    def _for_all(
        self, result: Any, weights: list[Parameter], everything: list[Parameter], active: list[bool] | None
    ) -> Any:
        """A result, with zeros for those of the weights that weren't differentiated by: they took no part."""
        if len(weights) == len(everything):
            return self._with_parameters(result, weights, active)
        place = {id(parameter): index for index, parameter in enumerate(weights)}
        took_part = {id(weight) for weight, arrived in zip(weights, active or [True] * len(weights)) if arrived}

        def filled(gradients: Any) -> Any:
            return tuple(
                gradients[place[id(p)]] if id(p) in place else ops.zeros(p.shape, p.dtype) for p in everything
            )

        reached = [id(parameter) in took_part for parameter in everything]
        return self._with_parameters(self._with_gradients(result, filled), everything, reached)

    def _without_first(self, result: Any) -> Any:
        """A result without the gradient of the first weight."""
        return self._with_gradients(result, lambda gradients: tuple(gradients)[1:])

    def _run_captured(
        self, forward: Callable[..., Any], weights: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run the function with arguments that MindSpore doesn't see: it records nothing in front of the weights."""
        sens: dict[str, Any] = {}
        if self._sens_param:
            if "sens" in kwargs:
                kwargs = dict(kwargs)
                sens["sens"] = kwargs.pop("sens")
            else:
                *args, sens["sens"] = args  # type: ignore[assignment]

        def run() -> Any:
            return forward(*args, **kwargs)

        with internals.hooks_anywhere():
            return self._native(run, weights=weights)(**sens)

    def _captured(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bool, Any]:
        """The arguments to take from outside, if something is frozen and what precedes it needs no recording."""
        if self._by_position or not self._something_is_frozen() or internals.gradient_running():
            return False, None
        if self._sens_param and not args and "sens" not in kwargs:
            return False, None
        can, taken = internals.captured((args, tuple(kwargs.values())))
        return can, (taken[0], dict(zip(kwargs, taken[1])))

    def _something_is_frozen(self) -> bool:
        """Whether a layer has no trainable parameter; where that is asked, is looked up once."""
        version = _touching.Structure.version, _touching.Touches.count, self._has_run
        if self._layers is None or self._version != version:
            self._version = version
            if self._layers is None:
                self._roots = [weakref.ref(cell, self._look_again) for cell in within([self._fn]).cells]
            cells = [cell for cell in (root() for root in self._roots) if cell is not None]
            own = (_touching.own_parameters(cell) for cell in _touching.subtree(*cells))
            is_dead = _deferral.is_deferred if self._has_run else lambda _: False  # nobody knows before
            self._layers = [parameters for parameters in own if not all(map(is_dead, parameters))]
            self._parameters = [parameter for parameters in self._layers for parameter in parameters]
            self._flags = None
        flags = internals.trainable_flags(self._parameters)
        if flags != self._flags:
            self._flags = flags
            position = iter(flags)
            self._frozen = any([not any([next(position) for _ in parameters]) for parameters in self._layers])
        return self._frozen

    def _look_again(self, _: Any = None) -> None:
        """The function has come to refer to other cells: keep nothing of those that are gone."""
        self._layers, self._roots, self._parameters, self._flags = None, [], [], None

    def _now(self) -> list[Parameter]:
        """The weights as they stand, the function having run."""
        if isinstance(self._weights, TouchedParameters):
            self._weights.refresh()
        weights = _listed(self._weights)
        if not weights:
            raise UntouchedError(_EMPTY.format(why=_why_empty(self._weights)))
        return weights

    def _refuse_unfit(self) -> None:
        weights = _listed(self._weights)
        for weight in weights:
            if not isinstance(weight, Parameter):
                raise TypeError(_KINDS.format(kind=f"a list with a {type(weight).__name__}"))
        if self._takes_frozen:
            return
        if not weights:
            raise LazyCellError(_EMPTY.format(why="weights is empty"))
        if not all(internals.trainable_flags(weights)):
            frozen = [parameter.name for parameter in weights if not parameter.requires_grad]
            raise LazyCellError(_FROZEN.format(names=the_first(frozen)))

    # In Graph mode

    def _in_graph(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Let MindSpore compile the function, with the weights that it is known to use."""
        args = self._positional(args, kwargs)
        live = self._weights if isinstance(self._weights, TouchedParameters) else None
        if any(map(is_unsized, _listed(self._weights))) if live is None else not live.has_completed():
            touch_by(self._fn, args[:-1] if self._sens_param else args, {})
        if live is not None:
            self._now()
        self._fill_given()
        with live.without_unused() if live is not None else nullcontext():
            result, weights, active = self._run_graph(args, live)
        if isinstance(self._weights, Parameter):
            return result
        return self._for_all(result, weights, weights if live is None else live.shown(), active)

    def _run_graph(
        self, args: tuple[Any, ...], live: TouchedParameters | None
    ) -> tuple[Any, list[Parameter], list[bool] | None]:
        """Run the graph, compiled if need be; what it returns, for which weights, and which of them take part."""
        held = [] if live is not None else list(map(id, _listed(self._weights)))
        if self._compiled is None or self._compiled[0] != held:
            self._compiled = held, self._native(self._fn, weights=self._weights)
        result = self._compiled[1](*args)
        weights = _listed(self._weights) if live is None else live.counted()
        wanted = participants and not isinstance(self._weights, Parameter)
        return result, weights, self._in_forward_graph(weights, args) if wanted else None

    def _in_forward_graph(self, weights: list[Parameter], args: tuple[Any, ...]) -> list[bool]:
        """Whether each weight is in the graph of the function itself, for these arguments."""
        if not hasattr(self, "_forward"):
            self._forward = internals.ForwardGraphs(self._fn)
        try:
            held = set(map(id, self._forward.parameters(args[:-1] if self._sens_param else args)))
        except Exception as error:  # it has just been compiled with its gradients
            _log.warning("it isn't known which parameters take part, so all count: %r", error)
            return [True] * len(weights)
        return [id(weight) in held for weight in weights]

    def _positional(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """All arguments by position, which is all that MindSpore's function takes in Graph mode."""
        if not kwargs:
            return args
        named = dict(kwargs)
        sens = (named.pop("sens"),) if self._sens_param and "sens" in named else ()
        function = self._fn.construct if isinstance(self._fn, nn.Cell) else self._fn
        bound = inspect.signature(function).bind(*args, **named)
        bound.apply_defaults()
        if bound.kwargs:
            names = ", ".join(bound.kwargs)
            raise TypeError(f"MindSpore's gradient functions take no keyword-only arguments in Graph mode: {names}.")
        return (*bound.args, *sens)

    def in_compilation(self) -> Callable[..., Any]:
        """What stands for this in a graph that is being compiled: MindSpore's own function."""
        try:
            if self._weights is not None and not isinstance(self._weights, TouchedParameters):
                _reading.note_in_compilation(self._in_graphs)
                self._refuse_unfit()
        except LazyCellError as error:
            _reading.note_in_compilation(Refusal(error))  # MindSpore would hide one that is raised here
        native: Callable[..., Any] = self._native(self._fn, weights=self._weights)
        return native

    # Both

    def _with_gradients(self, result: Any, change: Callable[[Any], Any]) -> Any:
        """A result with the gradients of the weights changed."""

        def changed(gradients: Any) -> Any:
            return (gradients[0], change(gradients[1])) if self._by_position else change(gradients)

        if self._get_value:
            return result[0], changed(result[1])
        if self._has_aux:
            return changed(result[0]), *result[1:]
        return changed(result)

    def _with_parameters(self, result: Any, weights: list[Parameter], active: list[bool] | None) -> Any:
        """MindSpore's result, its gradients of the weights replaced by `Gradients`."""
        if isinstance(self._weights, Parameter):
            return result

        def known(gradients: Any) -> Any:
            values = tuple(pair[1] for pair in gradients) if self._return_ids else gradients
            computed = Computed(weights, values, active and _verified(values, active))
            if internals.in_data_parallel():
                live = isinstance(self._weights, TouchedParameters) and not self._return_ids
                computed = of_all_ranks(computed, self._weights if live else None)
            made = Gradients(computed.gradients, computed.parameters, computed.active)
            made.as_computed = True
            self._history.note(made.parameters, None if active is None else made.active)
            if active is not None:
                took_part = list(compress(made.parameters, made.active))
                for parameter, is_known in zip(took_part, _touching.are_touched(took_part)):
                    if not is_known:
                        _touching.touch(parameter)  # it was used where nobody sees it
                for participant in list(participants):
                    participant.took_part(made)
            return gradients if self._return_ids else made

        return self._with_gradients(result, known)


class _InGraphs(_touching.Observer):
    """The graphs that hold a list of weights; compiled anew, they refuse what has been frozen among them."""

    def __init__(self) -> None:
        self._graphs: list[internals.Forget] = []
        _touching.observers.add(self)

    def graph_finished(self, forget: internals.Forget) -> None:
        self._graphs.append(forget)

    def parameters_frozen(self, parameters: list[Parameter]) -> None:
        while self._graphs:
            self._graphs.pop()()


class Refusal:
    """Keeps a graph from running."""

    def __init__(self, error: LazyCellError) -> None:
        self._error = error

    def graph_finished(self, forget: internals.Forget) -> None:
        raise self._error


def _understood(weights: Any) -> Any:
    """The weights: None, a parameter, a tuple of them, or a live list."""
    if isinstance(weights, nn.Cell):
        return TouchedParameters(weights)
    if weights is None or isinstance(weights, (Parameter, ParameterTuple, list)):
        return weights
    if isinstance(weights, tuple):
        return list(weights)
    raise TypeError(_KINDS.format(kind=type(weights).__name__))


def _listed(weights: Any) -> list[Parameter]:
    if isinstance(weights, TouchedParameters):
        return weights.shown()
    return [weights] if isinstance(weights, Parameter) else list(weights)


def _why_empty(weights: TouchedParameters) -> str:
    if any(_touching.is_touched(parameter) for parameter, _ in weights._known):
        return "every parameter that was touched is frozen"
    return "the function has touched no parameter of the cell that the weights belong to"


def _verified(gradients: tuple[Any, ...], active: list[bool]) -> list[bool]:
    """Count a parameter as active also if its gradient isn't zero, however it came about."""
    if all(active):
        return active
    doubtful = [index for index, reached in enumerate(active) if not reached]
    verified = list(active)
    for index, is_nonzero in zip(doubtful, are_nonzero([gradients[index] for index in doubtful])):
        verified[index] = is_nonzero
    return verified
