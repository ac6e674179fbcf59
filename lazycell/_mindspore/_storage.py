"""Parameters without storage, and what asks for their values."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from types import FrameType
from typing import Any, cast

import mindspore
from mindspore import Parameter, Tensor
from mindspore.common.initializer import Initializer, Zero

from lazycell._mindspore._draws import with_seed
from lazycell._mindspore._versions import api


class _WithoutStorage(Parameter):  # type: ignore[misc]
    """A spelling of ``Parameter`` whose ``__new__`` leaves initializers alone."""

    init_param = False


def tensor_without_storage(shape: tuple[int, ...], dtype: Any, init: Initializer) -> Tensor:
    """A tensor that knows its initializer and holds no memory until ``init_data()``."""
    return Tensor(shape=shape, dtype=dtype, init=init)


def parameter_without_storage(init: Initializer, like: Parameter, shape: tuple[int, ...]) -> Parameter:
    """A new parameter of the dtype, name and flags of another, holding no memory."""
    tensor = tensor_without_storage(shape, like.init_mode.dtype, init)
    parameter = Parameter.__new__(_WithoutStorage, tensor)
    Parameter.__init__(parameter, tensor, like.name, like.requires_grad, like.layerwise_parallel)
    if parameter.dtype != like.dtype:
        parameter.set_dtype(like.dtype)
    return parameter


def set_initializer(parameter: Parameter, tensor: Tensor) -> None:
    """Let a parameter without storage take the initializer of a tensor, which may belong to others as well."""
    parameter.init = tensor.init
    parameter.init_mode = tensor_without_storage(tensor.shape, tensor.dtype, tensor.init)


def set_seed_of(parameter: Parameter, seed: int) -> None:
    """Let a parameter without storage, which has a seed, draw its values from another one."""
    tensor = parameter.init_mode
    set_initializer(parameter, tensor_without_storage(tensor.shape, tensor.dtype, with_seed(tensor.init, seed)))


def nominal_shape(parameter: Parameter) -> tuple[int, ...]:
    """What MindSpore holds for the shape of a parameter, whatever its class answers."""
    return tuple(object.__getattribute__(parameter, "shape"))


def copy_without_shape(parameter: Parameter) -> Parameter:
    """A copy of a parameter that has a shape in name only, with neither its values nor its initializer."""
    tensor = parameter if parameter.init_mode is None else parameter.init_mode
    like = tensor_without_storage(nominal_shape(parameter), tensor.dtype, Zero())
    copied = Parameter.__new__(_WithoutStorage, like)
    Parameter.__init__(copied, like, parameter.name, parameter.requires_grad, parameter.layerwise_parallel)
    if copied.dtype != parameter.dtype:
        copied.set_dtype(parameter.dtype)
    return copied


def give_shape(native: type, parameter: Parameter, like: Parameter) -> None:
    """Let a parameter have the shape of another, and its values or its initializer; a dtype set meanwhile stays."""
    before = None if parameter.init_mode is None else parameter.init_mode.dtype
    dtype, shape = parameter.dtype, nominal_shape(like)
    _hold_another_tensor(parameter)
    if like.has_init:
        tensor = tensor_without_storage(shape, like.init_mode.dtype, like.init)
        native.assign_value(parameter, tensor)  # type: ignore[attr-defined]
        set_initializer(parameter, tensor)
    else:
        assign_storage(native, parameter, like)
    parameter.param_info.parameter_shape = shape
    parameter.requires_grad = parameter.requires_grad  # from now on, with this shape
    if before is not None and dtype != before:
        parameter.set_dtype(dtype)


def _hold_another_tensor(parameter: Parameter) -> None:
    """Let a parameter's object stand for a tensor that doesn't require a gradient yet.

    Where gradients don't arrive, MindSpore gives zeros of the shape that a tensor had when it first required one.
    """
    native = Tensor.__mro__[1]
    native.__setstate__(parameter, native.__getstate__(Tensor(0.0)))
    parameter.param_info = parameter.param_info


def drop_storage(parameter: Parameter, init: Initializer) -> None:
    """Free a parameter's memory in place; ``init`` will bring its values back."""
    tensor = tensor_without_storage(parameter.shape, parameter.dtype, init)
    parameter.assign_value(tensor)
    set_initializer(parameter, tensor)


def fill_storage(native: type, parameter: Parameter) -> None:
    """Give a parameter without storage the values of its initializer, in place."""
    values = parameter.init_mode.init_data()
    if values.dtype != parameter.dtype:  # set_dtype() came before the first use
        values = values.astype(parameter.dtype)
    assign_storage(native, parameter, values)


def assign_storage(native: type, parameter: Parameter, values: Tensor) -> None:
    """Assign values to a parameter without storage, by the methods of its native class."""
    native.assign_value(parameter, values)  # type: ignore[attr-defined]
    parameter.init = None
    parameter.init_mode = None


def snapshot(tensor: Tensor) -> Tensor:
    """A plain tensor of the same bits, with storage of its own; a parameter's ``copy()`` is one, and never freed."""
    if tensor.dtype == mindspore.bfloat16:  # which the operator doesn't know on every device
        return cast(Tensor, Tensor(tensor).copy())
    return cast(Tensor, mindspore.ops.deepcopy(tensor))


_DEFERRED_TYPES = (
    mindspore.float16, mindspore.bfloat16, mindspore.float32, mindspore.float64, mindspore.complex64,
    mindspore.complex128,
)  # fmt: skip


def can_be_deferred(parameter: Parameter) -> bool:
    """Whether a new parameter is one that lazycell knows how to defer.

    Not on the meta device, nor in automatic parallelism: there MindSpore itself keeps it without
    storage. Nor a parameter of a user's own tensor class. Nor integers, booleans and scalars: MindSpore
    takes them as indices, sizes, masks and numbers without asking, and they are small.
    """
    if parameter.dtype not in _DEFERRED_TYPES or not parameter.ndim:
        return False
    if parameter.is_in_parallel or getattr(parameter, "is_meta", False):  # is_meta: MindSpore 2.9 and later
        return False
    return type(parameter) is Parameter._get_base_class(Tensor)


def is_without_storage(parameter: Parameter) -> bool:
    """Whether a parameter knows its initializer and holds no memory."""
    return bool(parameter.has_init)


# What can be asked of a parameter without needing its values. Names that start with an underscore, that the
# user set, or that no parameter has, are let through as well.
METADATA = frozenset(
    """
    add_pipeline_stage assign_value assign_value_cpp cache_enable cache_shape comm_fusion device dim dtype
    element_size get_device grad has_init init init_data init_flag init_mode init_param inited_param is_complex
    is_default_input_init is_floating_point is_in_parallel is_init is_leaf is_meta is_parameter is_signed itemsize
    key layerwise_parallel load name nbytes ndim ndimension nelement numel parallel_optimizer
    parallel_optimizer_comm_recompute param_info register_hook requires_aggr requires_grad set_data set_dtype shape
    size sliced unique wait_pipeline
    """.split()
)

# MindSpore 2.9 and later
OPERATORS_ASK = importlib.util.find_spec("mindspore.utils.ms_dispatch") is not None

# MindSpore 2.9 and later look these up on every tensor that an operator is given, before they look at
# its values. On older versions most operators refuse a parameter without storage ("is uninitialized"); the
# others look up the last one, or are guarded by guard_operators().
_OPERATOR_LOOKUPS = frozenset(("__ms_dispatch__", "__fallback__", "__parameter__"))

# MindSpore 2.9 and later call this method of a tensor, if it has one, in the place of any operator that it is given to.
IN_PLACE_OF_OPERATORS = "__fallback__"

_STRUCTURAL = frozenset(
    """
    __class__ __deepcopy__ __del__ __delattr__ __dict__ __dir__ __doc__ __format__ __getattr__ __getattribute__
    __getstate__ __hash__ __init__ __init_subclass__ __len__ __module__ __new__ __parameter__ __repr__ __setattr__
    __sizeof__ __str__ __subclasshook__ __weakref__
    """.split()
)


# What tells a parameter's shape.
SHAPE = frozenset("cache_shape dim nbytes ndim ndimension nelement numel shape size".split())

# Where MindSpore looks at a parameter's shape because a value is about to be loaded into it, and the value's name.
_LOADERS = {"_update_param": "new_param", "_load_from_state_dict": "input_param"}


def about_to_be_loaded(frame: FrameType | None) -> Tensor | None:
    """The value that MindSpore's function, whose frame asks for a parameter's shape, is about to load into it."""
    if frame is None or not str(frame.f_globals.get("__name__")).startswith("mindspore."):
        return None
    value = frame.f_locals.get(_LOADERS.get(frame.f_code.co_name, ""))
    return value if isinstance(value, Tensor) else None


_guarded: list[bool] = []


def guard_operators(needs_reading: Callable[[object], bool], read: Callable[[Parameter], None]) -> None:
    """Let the operators that neither ask nor refuse (Assign, ReduceSum, Gather) ask, on MindSpore before 2.9.

    They would compute on storage without values, without an error. All of them pass through one method of
    one private object.
    """
    if OPERATORS_ASK or _guarded:
        return
    _guarded.append(True)
    native = api._pynative_executor.run_op_async

    def run_op_async(primitive: Any, name: str, arguments: Any) -> Any:
        pending = list(arguments)
        while pending:
            argument = pending.pop()
            if isinstance(argument, (list, tuple)):
                pending.extend(argument)
            elif needs_reading(argument):
                read(argument)
        return native(primitive, name, arguments)

    api._pynative_executor.run_op_async = run_op_async


def needs_values(parameter: Parameter, name: str, caller: FrameType | None) -> bool:
    """Whether looking up this attribute of a parameter means that its values are about to be used."""
    if name in METADATA:
        return False
    if name == "__class__":
        # Tensor(parameter) copies the storage after a few isinstance() checks, and looks up nothing else.
        return caller is not None and caller.f_code.co_name == "_check_input_data_type"
    if name.startswith("_"):
        return name in _OPERATOR_LOOKUPS
    return name not in object.__getattribute__(parameter, "__dict__") and hasattr(type(parameter), name)


def value_dunders(native: type) -> list[str]:
    """The special methods of a parameter class that read or write values."""
    names = (name for name in dir(native) if name.startswith("__") and name.endswith("__"))
    return [name for name in names if name not in _STRUCTURAL and callable(getattr(native, name))]
