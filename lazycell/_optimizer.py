"""An optimizer that may be built first, grows with what is touched, and updates what took part."""

from __future__ import annotations

import re
import sys
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from types import MethodType
from typing import Any

from mindspore import Parameter, ParameterTuple, Tensor, nn

from lazycell import _mindspore as internals
from lazycell import _reading
from lazycell._aligned import Gradients, participants
from lazycell._errors import LazyCellError, UntouchedError
from lazycell._gradient import Refusal
from lazycell._groups import Groups, OptimizerParameters
from lazycell._touching import touch_order

_MOST_SETS = 64  # of parameters that took part together, for which a native optimizer is kept

_UNBORN = """\
LazyOptimizer({factory}) has no {name} yet: none of its parameters has been touched, so there is no {factory}. Call \
the net, or lazycell.dry_run(net, inputs), before."""

_COUNT = """\
LazyOptimizer({factory}) got {given} gradients for {wanted} parameters: {detail}. Give it the gradients of its own \
parameters, as lazycell.value_and_grad(fn, None, optimizer.parameters) computes them. Nothing was updated."""

_SHAPE = """\
the gradient of {name} has shape {given}, but the parameter has shape {wanted}: the gradients are those of another \
net, or in another order. Nothing was updated."""


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


def _unborn_construct(self, gradients):  # type: ignore[no-untyped-def]  # likewise; the graph is refused before it runs
    return gradients


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
        nn.Cell.__init__(self, auto_prefix=False)
        self._factory = factory
        self._arguments = tuple(map(_reusable, args))
        self._named = {name: _reusable(value) for name, value in kwargs.items()}
        self._assigned: dict[str, Any] = {}
        self._activity = activity
        self._natives: OrderedDict[tuple[int, ...], nn.Cell] = OrderedDict()
        self._seen: set[int] = set()  # by a gradient function since the last step
        self._active: set[int] = set()  # of these, what took part
        self._groups = Groups(params)
        self.__dict__["parameters"] = OptimizerParameters(self._groups, factory.__name__)
        if activity:
            participants.add(self)

    def __call__(self, gradients: Any, *args: Any) -> Any:
        """Update the parameters that took part.

        Args:
            gradients: A tuple of gradients, one for each of `parameters`; those that know their parameters may come
                in any order.

        Returns:
            What the native optimizer returns.

        Raises:
            LazyCellError: They are too many, too few, of another net, or of other shapes. Nothing was updated.
            UntouchedError: None of the parameters has been touched.
        """
        pairs = self._matched(gradients)
        native = self._native_for([parameter for parameter, _ in pairs]) if pairs else None
        self._seen.clear()
        self._active.clear()
        return native(tuple(gradient for _, gradient in pairs), *args) if native is not None else ()

    # Gradients

    def took_part(self, gradients: Gradients) -> None:
        """Note which parameters took part in what `value_and_grad` or `grad` has computed."""
        for parameter, active in zip(gradients.parameters, gradients.active):
            self._seen.add(id(parameter))
            if active:
                self._active.add(id(parameter))

    def _matched(self, gradients: Any) -> list[tuple[Parameter, Any]]:
        """Pairs of a parameter to be updated, and its gradient."""
        self.parameters.refresh()
        parameters = self.parameters[:]
        if not isinstance(gradients, (tuple, list)):
            raise TypeError(f"LazyOptimizer takes a tuple of gradients, but got a {type(gradients).__name__}.")
        if not parameters:
            raise self._unborn("parameters")
        if isinstance(gradients, Gradients):
            found = self._by_parameter(parameters, gradients)
        else:
            if len(gradients) != len(parameters):
                raise self._miscounted(len(gradients), f"they are {_names(parameters)}")
            found = [(p, g, id(p) in self._active or id(p) not in self._seen) for p, g in zip(parameters, gradients)]
        for parameter, gradient, _ in found:
            shape = getattr(gradient, "shape", None)
            if gradient is None or (isinstance(gradient, Tensor) and tuple(shape or ()) != tuple(parameter.shape)):
                names = {"name": parameter.name, "given": shape, "wanted": tuple(parameter.shape)}
                raise LazyCellError(_SHAPE.format(**names))
        return [(parameter, gradient) for parameter, gradient, active in found if active or not self._activity]

    def _by_parameter(self, parameters: list[Parameter], gradients: Gradients) -> list[tuple[Parameter, Any, bool]]:
        known = {id(parameter) for parameter, _ in self.parameters._known}
        foreign = [parameter for parameter in gradients.parameters if id(parameter) not in known]
        if foreign:
            raise self._miscounted(len(gradients), f"{_names(foreign)} is not among them")
        given = {id(p): (p, g, active) for p, g, active in zip(gradients.parameters, gradients, gradients.active)}
        latest = max((touch_order(p) or 0 for p in gradients.parameters), default=0)
        missing = [p for p in parameters if id(p) not in given and (touch_order(p) or 0) <= latest]
        if missing:
            raise self._miscounted(len(gradients), f"there is none of {_names(missing)}")
        return [given[id(parameter)] for parameter in parameters if id(parameter) in given]

    def _miscounted(self, given: int, detail: str) -> LazyCellError:
        wanted = len(self.parameters[:])
        return LazyCellError(_COUNT.format(factory=self._factory.__name__, given=given, wanted=wanted, detail=detail))

    # The native optimizer

    def _unborn(self, name: str) -> _Unborn:
        return _Unborn(_UNBORN.format(factory=self._factory.__name__, name=name))

    def _native_for(self, parameters: list[Parameter]) -> nn.Cell:
        """The native optimizer over some parameters; all of them share their state."""
        key = tuple(map(id, parameters))
        if key not in self._natives:
            self._natives[key] = self._build(parameters)
            while len(self._natives) > _MOST_SETS:
                self._natives.popitem(last=False)
        self._natives.move_to_end(key)
        native = self._natives[key]
        self._take_over_options(native)
        return native

    def _whole(self, name: str) -> nn.Cell:
        """The native optimizer over all parameters."""
        self.parameters.refresh()
        if not self.parameters[:]:
            raise self._unborn(name)
        native = self._native_for(self.parameters[:])
        self.__dict__["native"] = native
        return native

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
        native = self._factory(given, *self._arguments, **self._named)
        native._lazycell_positions = positions
        self._share_state(native, parameters, positions)
        for name, value in self._assigned.items():
            setattr(native, name, value)
        return native

    def _share_state(self, native: nn.Cell, parameters: list[Parameter], positions: list[int]) -> None:
        """Let a new native optimizer use the state that there is, and take in what it brings."""
        trained = {id(parameter) for parameter in parameters}
        fresh = [p for p in internals.parameters_held(native) if id(p) not in trained]
        table: dict[int, Parameter] = {}
        names: dict[str, Parameter] = {}
        for parameter in fresh:
            name = _stable_name(parameter.name, positions)
            first = names.setdefault(name, parameter)
            if not _are_equal(first, parameter):  # MindSpore builds a group's learning rate twice
                raise LazyCellError(f"{self._factory.__name__} has two states named {name}, which can't be told apart.")
            existing = self._params.get(name)
            if existing is not None and existing.shape != parameter.shape:
                raise LazyCellError(
                    f"the state {name} has shape {tuple(existing.shape)}, but {self._factory.__name__} needs "
                    f"{tuple(parameter.shape)}: it was loaded from a checkpoint of another net."
                )
            table[id(parameter)] = first if existing is None else existing
        if not self._natives:
            self._refuse_foreign([name for name in self._params if name not in names])
        for name, parameter in names.items():
            parameter.name = name
            self._params[name] = table[id(parameter)]
        internals.replace_parameters(native, table)

    def _take_over_options(self, native: nn.Cell) -> None:
        """Let what was set in ``param_groups`` of one native optimizer hold in the others."""
        source = vars(self).get("native")
        if source is None or source is native or not hasattr(native, "param_groups"):
            return
        known = dict(zip(source._lazycell_positions or [0], source.param_groups))
        for position, group in zip(native._lazycell_positions or [0], native.param_groups):
            options = known.get(position, {}).items()
            group.update((key, value) for key, value in options if key != "params" and not _is_of_parameters(value))

    def _build_in(self) -> bool:
        """Get ready for a graph that is being compiled; if there is nothing to put in, it is refused: False."""
        try:
            self._whole("construct")
        except _Unborn as error:
            _reading.note_in_compilation(Refusal(error))
            return False
        self.parameters.note_built_in()
        return True

    # Looking like the native optimizer

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "parameters" not in vars(self) or (name.startswith("__") and name.endswith("__")):
                raise
        return getattr(self._whole(name), name)

    def __setattr__(self, name: str, value: Any) -> None:
        described = getattr(self._factory, name, None) if "_factory" in vars(self) else None
        if not isinstance(described, property):
            super().__setattr__(name, value)
            return
        self._assigned[name] = value
        for native in self._natives.values():
            setattr(native, name, value)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, as ``experimental.optim`` has it; its members may be lazy."""
        if not self._groups.named:
            raise LazyCellError("add_param_group() needs an optimizer that was built from parameter groups.")
        self._groups.add([param_group])
        self._natives.clear()
        self.parameters._look()

    # Checkpoints

    def state_dict(self) -> dict[str, Parameter]:
        """The optimizer's state by name, as ``"moment1.fc.weight"``; what was loaded and isn't needed yet included.

        ``mindspore.save_checkpoint(optimizer, path)`` saves the same.
        """
        if self.parameters[:]:
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
        if self.parameters[:]:
            self._whole("load_state_dict")
        own = {parameter.name for parameter, _ in self.parameters._known}
        entries = {name: value for name, value in state_dict.items() if name not in own}
        if self._natives:
            unknown = [name for name in entries if name not in self._params]
            if strict:
                self._refuse_foreign(unknown)
            entries = {name: value for name, value in entries.items() if name not in self._foreign(unknown)}
        for name, value in entries.items():
            if name in self._params and tuple(self._params[name].shape) != tuple(value.shape):
                shapes = f"{tuple(value.shape)}, but here it has {tuple(self._params[name].shape)}"
                raise LazyCellError(f"the state {name} has shape {shapes}. Nothing was changed.")
        for name, value in entries.items():
            if name in self._params:
                self._params[name].set_data(Tensor(value))
            else:
                self._params[name] = Parameter(Tensor(value), name=name, requires_grad=False)

    def _foreign(self, names: list[str]) -> list[str]:
        """Which names of states can't be those of any parameter here."""
        suffixes = tuple("." + parameter.name for parameter, _ in self.parameters._known)
        return [name for name in names if not name.endswith(suffixes)]

    def _refuse_foreign(self, names: list[str]) -> None:
        foreign = self._foreign(names)
        if foreign:
            raise LazyCellError(
                f"{len(foreign)} entries of the state that was loaded belong to nothing here, {foreign[0]!r} first: "
                "the checkpoint is that of another optimizer or net. strict=False leaves them out."
            )


def _reusable(value: Any) -> Any:
    """An argument that can be given several times: an iterator would be empty the second time."""
    return list(value) if isinstance(value, Iterator) and not isinstance(value, nn.Cell) else value


def _are_equal(one: Parameter, other: Parameter) -> bool:
    return one is other or (one.shape == other.shape and bool((one.asnumpy() == other.asnumpy()).all()))


def _is_of_parameters(value: Any) -> bool:
    return isinstance(value, ParameterTuple)


def _names(parameters: list[Parameter]) -> str:
    more = f" and {len(parameters) - 5} more" if len(parameters) > 5 else ""
    return ", ".join(parameter.name for parameter in parameters[:5]) + more


def _stable_name(name: str, positions: list[int]) -> str:
    """A state's name, where MindSpore numbers groups, by the group's position among all that were given."""
    found = re.fullmatch(r"(.*_group_)(\d+)", name)
    if found is None or int(found[2]) >= len(positions):
        return name
    return f"{found[1]}{positions[int(found[2])]}"
