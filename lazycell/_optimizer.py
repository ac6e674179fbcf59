"""An optimizer that may be built first, grows with what is touched, and updates what took part."""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from itertools import compress
from types import MethodType
from typing import Any

import mindspore
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops

from lazycell import _construction
from lazycell import _mindspore as internals
from lazycell import _reading
from lazycell._aligned import Gradients, are_nonzero, participants
from lazycell._errors import LazyCellError, UntouchedError, UntouchedWarning, the_first, warn
from lazycell._groups import Groups, OptimizerParameters
from lazycell._listed import Patched
from lazycell._live import touch_all
from lazycell._states import States
from lazycell._together import refuse_differing
from lazycell._touching import is_touched, mark_optimized, touch, touch_order

# Of parameters that took part together: so many get a native optimizer of their own, which costs what they cost. For
# others all are updated, and the rest is put back; MindSpore compiles each optimizer, and never frees what it compiled.
_MOST_SETS = 4

_UNBORN = """\
LazyOptimizer({factory}) has no {name} yet: none of its parameters has been touched, so there is no {factory}. Call \
the net, or lazycell.dry_run(net, inputs), before."""

_OF_GROUPS = ("param_groups", "lrs")

_COUNT = """\
LazyOptimizer({factory}) got {given} gradients for {wanted} parameters: {detail}. Give it the gradients of its own \
parameters, as lazycell.value_and_grad(fn, None, optimizer.parameters) computes them. Nothing was updated."""

_SHAPE = """\
the gradient of {name} has shape {given}, but the parameter has shape {wanted}: the gradients are those of another \
net, or in another order. Nothing was updated."""


_STATELESS = """\
LazyOptimizer({factory}) has no state yet, so nothing can be listed, saved, or loaded into it by MindSpore. \
optimizer.load_state_dict(mindspore.load_checkpoint(path)) keeps what it is given until it is needed."""


class _Unborn(UntouchedError, AttributeError):
    """An attribute of the native optimizer was asked for before there is one."""

    __module__ = "lazycell"


class _Construct:
    """``construct`` of a LazyOptimizer: MindSpore's compiler is given that of the native optimizer."""

    def __get__(self, optimizer: LazyOptimizer | None, owner: type) -> Any:
        if optimizer is None:
            return _construct
        if internals.parser_asks(sys._getframe().f_back) and not optimizer._build_in():
            return MethodType(_unborn_construct, optimizer)
        return MethodType(_construct, optimizer)


def _construct(self, gradients):  # type: ignore[no-untyped-def]  # MindSpore's compiler parses this
    return self.native(gradients)


def _unborn_construct(self, gradients):  # type: ignore[no-untyped-def]  # likewise; this graph never runs
    return gradients


class _Unbuilt:
    """A graph with an optimizer that has nothing to update; once compiled, it tells what is used."""

    def __init__(self, optimizer: LazyOptimizer, error: UntouchedError) -> None:
        self._optimizer, self._error = optimizer, error

    def graph_finished(self, forget: internals.Forget) -> None:
        """Have it compiled again with what it has touched."""
        self._optimizer.parameters.refresh()
        if not self._optimizer.parameters.counted():
            raise self._error
        raise internals.StaleGraph


class _Native(threading.local):
    """Whether a native optimizer is being built by this thread."""

    is_being_built = False


_native = _Native()
_classes: dict[type, type] = {}


class LazyOptimizer(nn.Cell):  # type: ignore[misc]
    """An optimizer of any of MindSpore's classes that may be built before anything ran.

    The native optimizer comes into being at the first step, over what was touched by then. What is touched later joins
    with fresh state, and all that exists is carried over: moments, ``global_step``, powers of beta, schedules. What is
    frozen leaves, and finds its state when it comes back.

    A parameter that took no part in a step is not updated: no decay, no momentum; value and state stay bit for bit as
    they were. Which ones took part is known of gradients that `value_and_grad` or `grad` computed since the last step,
    also when they have been clipped or accumulated meanwhile; of others all count as taking part. In Graph mode, what
    is in the graph of the function takes part. An optimizer that is itself inside a graph, as in a jitted training step
    or in ``TrainOneStepCell`` under Graph mode, updates all that it holds.

    All attributes of the native optimizer can be asked for, and ``isinstance(optimizer, factory)`` holds. State that
    an optimizer class of your own keeps must be in parameters, as MindSpore's is.

    Args:
        factory: A class of optimizers: of ``nn``, ``mint.optim``, ``experimental.optim``, or your own.
        params: A live list, a cell, a list of parameters, or parameter groups: dicts whose ``"params"`` are one of
            these, a predicate ``lambda p: ...`` over what the other groups list, or a pair (live list, predicate). A
            predicate that stands alone comes before lists: they get what it leaves.
        args: What ``factory`` takes after the parameters.
        activity: Whether parameters that took no part in a step are left alone. False gives MindSpore's behaviour.
        kwargs: What ``factory`` takes by name.

    Attributes:
        parameters: The parameters it updates, as a live list, in the order in which it takes gradients.

    Raises:
        TypeError: ``factory`` is no class of optimizers, or ``params`` are none of these.
        LazyCellError: Two groups hold one parameter, or a predicate has no list to choose from.

    Example:
        >>> import lazycell, mindspore as ms
        >>> from mindspore import nn
        >>> net = lazycell.track(nn.SequentialCell(nn.Dense(3, 2), nn.Dense(2, 1)))
        >>> optimizer = lazycell.LazyOptimizer(nn.AdamWeightDecay, [
        ...     {"params": lambda p: p.ndim < 2, "weight_decay": 0.0},
        ...     {"params": net, "weight_decay": 1e-2}], learning_rate=1e-3)
        >>> loss_and_grad = lazycell.value_and_grad(lambda x: net(x).sum(), None, optimizer.parameters)
        >>> loss, grads = loss_and_grad(ms.ops.ones((4, 3)))
        >>> updated = optimizer(grads)
        >>> [p.name for p in optimizer.parameters]
        ['0.bias', '1.bias', '0.weight', '1.weight']
    """

    __module__ = "lazycell"
    construct = _Construct()

    def __new__(cls, factory: Any = None, *args: Any, **kwargs: Any) -> Any:
        if not (isinstance(factory, type) and issubclass(factory, nn.Cell)):
            raise TypeError(f"LazyOptimizer takes a class of optimizers first, as nn.Adam, but got {factory!r:.100}.")
        if factory not in _classes:
            names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
            _classes[factory] = type(cls.__name__, (cls, factory), names)
        return super().__new__(_classes[factory])

    def __init__(self, factory: type[nn.Cell], params: Any, *args: Any, activity: bool = True, **kwargs: Any) -> None:
        with _construction.suspended():  # this is no layer
            nn.Cell.__init__(self, auto_prefix=False)
        inspect.signature(factory.__init__).bind(self, params, *args, **kwargs)  # says what is wrong now
        self._factory = factory
        self._arguments = tuple(map(_reusable, args))
        self._named = {name: _reusable(value) for name, value in kwargs.items()}
        self._assigned: dict[str, Any] = {}
        self._activity = activity
        self._natives: dict[tuple[int, ...], nn.Cell] = {}
        self._latest: dict[int, bool] = {}  # who took part in the last gradient since the last step
        self._active: set[int] = set()  # who took part in any
        self._raw_groups: dict[int, dict[str, Any]] = {}
        self._groups = Groups(params)
        self._states = States(self._params, factory.__name__, len(self._groups.groups))
        self.__dict__["parameters"] = OptimizerParameters(self._groups, factory.__name__)
        if activity:
            participants.add(self)
        self._is_ready = True

    def __call__(self, gradients: Any, *args: Any) -> Any:
        """Update the parameters that took part.

        Args:
            gradients: A tuple of gradients, one for each of `parameters`; those that know their parameters may come
                in any order.

        Returns:
            What the native optimizer returns.

        Raises:
            LazyCellError: They are too many, too few, of another net, of other shapes, or, in data parallelism, of
                other parameters than those of other ranks. Nothing was updated.
            UntouchedError: None of the parameters has been touched.
        """
        found = self._matched(gradients)
        self._latest.clear()
        self._active.clear()
        active = [(parameter, gradient) for parameter, gradient, is_active in found if is_active]
        if not active:
            return ()
        parameters, given = zip(*active)
        if len(parameters) == len(self.parameters.counted()):
            return self._whole("step")(given, *args)
        if tuple(map(id, parameters)) in self._natives or len(self._natives) < _MOST_SETS:
            return self._native_for(list(parameters))(given, *args)
        return self._update_and_put_back(found, args)

    # Gradients

    def took_part(self, gradients: Gradients) -> None:
        """Note which parameters took part in what `value_and_grad` or `grad` has computed."""
        ids = list(map(id, gradients.parameters))
        self._latest.update(zip(ids, gradients.active))
        self._active.update(compress(ids, gradients.active))

    def _matched(self, gradients: Any) -> list[tuple[Parameter, Any, bool]]:
        """The parameters with their gradients, and whether they took part."""
        self.parameters.refresh()
        parameters = self.parameters.counted()
        if parameters and "param_groups" in vars(self):
            self._whole("param_groups")  # someone holds the groups, and may see who is in them
        if not isinstance(gradients, (tuple, list)):
            raise TypeError(f"LazyOptimizer takes a tuple of gradients, but got a {type(gradients).__name__}.")
        if not parameters:
            if any(is_touched(parameter) for parameter, _ in self.parameters._known):
                raise LazyCellError("all parameters of LazyOptimizer that were touched are frozen: nothing to update.")
            raise self._unborn("parameters")
        if isinstance(gradients, Gradients):
            found = self._by_parameter(parameters, gradients)
        else:
            if len(gradients) != len(parameters):
                parameters, gradients = self._among_all(gradients)
            if internals.in_data_parallel() and not self._latest:  # gradients of MindSpore's own functions
                refuse_differing(parameters)
            found = list(zip(parameters, gradients, self._took_part(parameters, gradients)))
        if not getattr(gradients, "as_computed", False):
            _refuse_other_shapes((parameter, gradient) for parameter, gradient, _ in found)
        return [(parameter, gradient, active or not self._activity) for parameter, gradient, active in found]

    def _took_part(self, parameters: list[Parameter], gradients: Any) -> list[bool]:
        """For gradients that don't know: who took part in the last ones computed, or was added up from those before."""
        active = [self._latest.get(id(parameter), True) for parameter in parameters]
        doubtful = [i for i, parameter in enumerate(parameters) if not active[i] and id(parameter) in self._active]
        for index, is_nonzero in zip(doubtful, are_nonzero([gradients[index] for index in doubtful])):
            active[index] = is_nonzero
        return active

    def _by_parameter(self, parameters: list[Parameter], gradients: Gradients) -> list[tuple[Parameter, Any, bool]]:
        if list(map(id, parameters)) == list(map(id, gradients.parameters)):
            return list(zip(parameters, gradients, gradients.active))
        known = {id(parameter) for parameter, _ in self.parameters._known}
        foreign = [parameter for parameter in gradients.parameters if id(parameter) not in known]
        if foreign:
            raise self._miscounted(len(gradients), f"{_names(foreign)} is not among them")
        given = {id(p): (p, g, active) for p, g, active in zip(gradients.parameters, gradients, gradients.active)}
        missing = [p for p in parameters if id(p) not in given and (touch_order(p) or 0) <= gradients.made_at]
        if missing:
            raise self._miscounted(len(gradients), f"there is none of {_names(missing)}")
        return [given[id(parameter)] for parameter in parameters if id(parameter) in given]

    def _among_all(self, gradients: Any) -> tuple[list[Parameter], list[Any]]:
        """Gradients of all parameters, as a list made before anything was touched names them: those that count.

        One that isn't zero tells of a use that nobody saw.
        """
        everything = [parameter for parameter in self.parameters._all if parameter.requires_grad]
        if len(gradients) != len(everything):
            raise self._miscounted(len(gradients), f"they are {_names(self.parameters.counted())}")
        _refuse_other_shapes(zip(everything, gradients))
        unseen = [(p, gradient) for p, gradient in zip(everything, gradients) if not is_touched(p)]
        for (parameter, _), is_nonzero in zip(unseen, are_nonzero([gradient for _, gradient in unseen])):
            if is_nonzero:
                touch(parameter)
        given = {id(parameter): gradient for parameter, gradient in zip(everything, gradients)}
        parameters = self.parameters.counted()
        return parameters, [given[id(parameter)] for parameter in parameters]

    def _miscounted(self, given: int, detail: str) -> LazyCellError:
        wanted = len(self.parameters.counted())
        return LazyCellError(_COUNT.format(factory=self._factory.__name__, given=given, wanted=wanted, detail=detail))

    # The native optimizer

    def _unborn(self, name: str) -> _Unborn:
        return _Unborn(_UNBORN.format(factory=self._factory.__name__, name=name))

    def _native_for(self, parameters: list[Parameter]) -> nn.Cell:
        """The native optimizer over some parameters; all of them share their state."""
        key = tuple(map(id, parameters))
        if key not in self._natives:
            self._natives[key] = self._build(parameters)
        native = self._natives[key]
        self._take_over_options(native)
        return native

    def _whole(self, name: str) -> nn.Cell:
        """The native optimizer over all parameters."""
        self.parameters.refresh()
        parameters = self.parameters.counted()
        if not parameters:
            raise self._unborn(name)
        native = self._native_for(parameters)
        if vars(self).get("native") is not native:
            self.__dict__["native"] = native
            self._natives = {tuple(map(id, parameters)): native}  # those over parts of what there was before may go
            self._keep_groups(native)
        return native

    def _update_and_put_back(self, found: list[tuple[Parameter, Any, bool]], args: tuple[Any, ...]) -> Any:
        """Update all parameters, and give those that took no part, and their state, back what they had."""
        gradients = {id(parameter): gradient for parameter, gradient, _ in found}
        active = {id(parameter) for parameter, _, is_active in found if is_active}
        native = self._whole("step")
        resting = [parameter for parameter in self.parameters.counted() if id(parameter) not in active]
        kept = [(held, internals.snapshot(held)) for held in (*resting, *self._states.of(resting))]
        given = (gradients.get(id(parameter)) for parameter in self.parameters.counted())
        zeros = (ops.zeros_like(p) if g is None else g for p, g in zip(self.parameters.counted(), given))
        try:
            return native(tuple(zeros), *args)
        finally:
            for held, before in kept:
                ops.assign(held, before)  # in place: what has been compiled would not notice set_data()

    def _make(self, given: list[Any]) -> nn.Cell:
        building, _native.is_being_built = _native.is_being_built, True
        try:
            with _construction.suspended():
                return self._factory(given, *self._arguments, **self._named)
        finally:
            _native.is_being_built = building

    def _build(self, parameters: list[Parameter]) -> nn.Cell:
        wanted = {id(parameter) for parameter in parameters}
        given: list[Any] = parameters
        positions: list[int] = []  # of the groups that have members now
        if self._groups.named:
            given = []
            for index, (group, members) in enumerate(zip(self._groups.groups, self._groups.members())):
                listed = [parameter for parameter, _ in members if id(parameter) in wanted]
                if listed:
                    positions.append(index)
                    given.append({**group.options, "params": listed})
            if self._groups.order is not None:
                given.append({"order_params": parameters})
        native = self._make(given)
        native._lazycell_positions = positions or [0]
        for parameter in parameters:
            mark_optimized(parameter)
        if list(map(id, native.parameters)) != list(map(id, parameters)):
            raise LazyCellError(f"{self._factory.__name__} orders its parameters in a way of its own.")
        self._states.share(native, parameters, positions, self.parameters._all)
        for name, value in self._assigned.items():
            setattr(native, name, value)
        return native

    # Parameter groups as experimental.optim and mint.optim have them: one dict for each, which stays the same

    def _keep_groups(self, native: nn.Cell) -> None:
        """Let ``param_groups`` have an entry for each group that was given, whatever the native optimizer holds."""
        if not hasattr(native, "param_groups"):
            return
        kept = self.__dict__.setdefault("param_groups", [])
        held = dict(zip(native._lazycell_positions, native.param_groups))
        for index, group in enumerate(self._groups.groups):
            if index == len(kept):
                kept.append(held[index] if index in held else self._empty_group(native, index, group.options))
            elif index in held:
                raw = self._raw_groups.pop(index, {})
                for key, value in held[index].items():
                    unset = key in raw and kept[index].get(key) is raw[key]
                    if unset or key not in kept[index] or _is_of_parameters(key, value):
                        kept[index][key] = value
        native.param_groups = [kept[index] for index in native._lazycell_positions]
        self.__dict__["lrs"] = [group["lr"] for group in kept]

    def bear(self, name: str, named: Iterable[str] = ()) -> None:
        """Have a native optimizer now, since something is asked of it, though nothing has been used yet.

        Args:
            name: What is asked.
            named: Names of state: those parameters count as used that have some; if none has, all do.
        """
        if not self.parameters.counted():
            ends = [key.replace("_", ".") for key in named]
            for parameter in [p for p in self.parameters._all if p.requires_grad]:
                if any(end.endswith("." + parameter.name.replace("_", ".")) for end in ends):
                    touch(parameter)
            if not self.parameters.counted():
                touch_all(self.parameters)
        self._whole(name)

    def _like(self) -> nn.Cell:
        """A native optimizer over stand-ins, with the state that belongs to no parameter; for what is asked early."""
        if "_early" not in vars(self):
            native, trained = self._make_early()
            self._states.share_common(native, trained)
            self.__dict__["_early"] = native
        return vars(self)["_early"]

    def _make_early(self) -> tuple[nn.Cell, list[Parameter]]:
        """A native optimizer over stand-ins, one for each group; raises what MindSpore says of the arguments."""
        groups = self._groups.groups
        trained = [Parameter(Tensor([0.0], mindspore.float32), name=f"lazycell_like{n}") for n in range(len(groups))]
        if not self._groups.named:
            return self._make(trained), trained
        return self._make([{**group.options, "params": [p]} for group, p in zip(groups, trained)]), trained

    def _begin_groups(self) -> None:
        """Have groups before there is a native optimizer: schedulers are built over them."""
        like = self._like()  # for its defaults
        kept = [self._empty_group(like, index, group.options) for index, group in enumerate(self._groups.groups)]
        self.__dict__["param_groups"] = kept
        self.__dict__["lrs"] = [group["lr"] for group in kept]

    def _empty_group(self, native: nn.Cell, index: int, options: dict[str, Any]) -> dict[str, Any]:
        group = {**native.defaults, **options, "params": []}
        name = f"learning_rate_group_{index}"
        if name not in self._params:
            self._states.put(Parameter(Tensor(float(group["lr"]), mindspore.float32), name=name))
        group["lr"] = self._params[name]
        self._raw_groups[index] = dict(group)  # not yet checked and converted by the class
        return group

    def _take_over_options(self, native: nn.Cell) -> None:
        """Let what was set in ``param_groups`` hold in a native optimizer over a part of the parameters."""
        kept = vars(self).get("param_groups")
        if kept is None or native is vars(self).get("native"):
            return
        for index, group in zip(native._lazycell_positions, native.param_groups):
            raw = self._raw_groups.get(index, {})
            for key, value in (kept[index] if index < len(kept) else {}).items():
                if not (_is_of_parameters(key, value) or (key in raw and value is raw[key])):
                    group[key] = value

    def _build_in(self) -> bool:
        """Get ready for a graph that is being compiled; False if there is nothing to put in yet."""
        if Patched.active:  # gradients may come of a tuple of all that was listed, which the graph holds as well
            self.bear("construct")
            for parameter in self.parameters.shown():
                touch(parameter)
        try:
            self._whole("construct")
        except _Unborn as error:
            _reading.note_in_compilation(_Unbuilt(self, error))
            return False
        self.parameters.note_built_in()
        return True

    # Looking like the native optimizer

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "_is_ready" not in vars(self) or (name.startswith("__") and name.endswith("__")):
                raise
        if name in self._assigned:
            return self._assigned[name]
        if name in _OF_GROUPS and not self.parameters.counted() and internals.has_groups(self._factory):
            self._begin_groups()
        if name in vars(self):
            return vars(self)[name]
        native = self._answering(name)
        return vars(self)[name] if name in vars(self) else getattr(native, name)

    def _answering(self, name: str) -> nn.Cell:
        """The native optimizer that an attribute is asked of."""
        return self._whole(name)

    def __setattr__(self, name: str, value: Any) -> None:
        own = "_is_ready" not in vars(self) or name.startswith("_") or name in vars(self) or hasattr(nn.Cell, name)
        if own:
            super().__setattr__(name, value)
            return
        self._assigned[name] = value
        for native in self._natives.values():
            setattr(native, name, value)
        if isinstance(value, Parameter):
            self._states.put(value)

    def __repr__(self) -> str:
        if not self.parameters.counted():
            return f"LazyOptimizer({self._factory.__name__}, nothing touched yet)"
        return repr(self._whole("__repr__"))

    def __deepcopy__(self, memo: dict[int, Any]) -> LazyOptimizer:
        raise LazyCellError(
            "a LazyOptimizer can't be copied, as MindSpore's optimizers can't: build another one over the copied net, "
            "and give it state_dict() of this one."
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, as ``experimental.optim`` has it; its members may be lazy."""
        if not self._groups.named:
            raise LazyCellError("add_param_group() needs an optimizer that was built from parameter groups.")
        self._groups.add([param_group])
        self._states.num_groups += 1
        self._natives.clear()
        self.__dict__.pop("native", None)
        self.parameters._look()
        if self.parameters.counted():
            self._whole("param_groups")

    # Checkpoints

    def state_dict(self) -> dict[str, Parameter]:
        """The optimizer's state by name, as ``"moment1.fc.weight"``; what was loaded and isn't needed yet included.

        ``mindspore.save_checkpoint(optimizer, path)`` saves the same.
        """
        if self.parameters.counted():
            self._whole("state_dict")
        return dict(self._params)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Take over the state of an optimizer of the same class over the same net.

        State of parameters that this run has not touched yet is kept until it does.

        Args:
            state_dict: What `state_dict` returned, or what ``mindspore.load_checkpoint(path)`` returns, values of the
                net's own parameters included; these are left out.
            strict: Whether to refuse entries that belong to nothing here; otherwise they are left out. Before the first
                step it isn't known what does, and the first step refuses them.

        Raises:
            LazyCellError: An entry belongs to nothing here, or has another shape. Nothing is changed then.
        """
        if self._natives:
            self._whole("load_state_dict")
        self._states.load(state_dict, strict, self.parameters._all)

    def get_parameters(self, expand: bool = True) -> Iterator[Parameter]:
        """What the native optimizer holds: the parameters that it updates, and its state."""
        native = self._whole("get_parameters") if self.parameters.counted() else None
        return iter(()) if native is None else native.get_parameters(expand)

    def parameters_and_names(self, name_prefix: str = "", expand: bool = True) -> Iterator[tuple[str, Parameter]]:
        """What is saved in and loaded from checkpoints: the state, by name."""
        if self.parameters.counted():
            self._whole("parameters_and_names")
        elif not self._params:
            warn(UntouchedWarning(_STATELESS.format(factory=self._factory.__name__)))
        return iter(list(self._params.items()))


def is_native_being_built() -> bool:
    """Whether this thread is building the native optimizer of a `LazyOptimizer`."""
    return _native.is_being_built


def _refuse_other_shapes(pairs: Iterable[tuple[Parameter, Any]]) -> None:
    for parameter, gradient in pairs:
        shape = getattr(gradient, "shape", None)
        if gradient is None or (isinstance(gradient, Tensor) and tuple(shape or ()) != tuple(parameter.shape)):
            names = {"name": parameter.name, "given": shape, "wanted": tuple(parameter.shape)}
            raise LazyCellError(_SHAPE.format(**names))


def _reusable(value: Any) -> Any:
    """An argument that can be given several times: an iterator would be empty the second time."""
    return list(value) if isinstance(value, Iterator) and not isinstance(value, nn.Cell) else value


def _is_of_parameters(key: str, value: Any) -> bool:
    """Whether an entry of a parameter group lists its members, or state of theirs, rather than an option."""
    return key == "params" or isinstance(value, ParameterTuple)


def _names(parameters: list[Parameter]) -> str:
    return the_first([parameter.name for parameter in parameters])
