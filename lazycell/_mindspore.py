"""The only file that knows MindSpore's internals and versions.

Everything here was checked by running it on MindSpore 2.7.1 and 2.10.0; what differs in
between is told apart by looking for the feature, with the version in a comment.
"""

from __future__ import annotations

import copy
import functools
import gc
import importlib.util
import operator
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from enum import Enum
from types import FrameType, ModuleType
from typing import Any, cast

import mindspore
import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn
from mindspore.common import initializer as _initializers
from mindspore.common.initializer import Initializer

from lazycell._errors import LazyCellError

try:  # MindSpore 2.9 and later
    from mindspore.graph import api as _api
except ImportError:
    from mindspore.common import api as _api

# ---------------------------------------------------------------------------------------------
# Versions

TESTED = "2.7.1, 2.8.0, 2.9.0 and 2.10.0"

# What lazycell relies on beyond MindSpore's documentation; other versions may have renamed it.
_NEEDED: tuple[tuple[Any, tuple[str, ...]], ...] = (
    (_api, ("_pynative_executor", "ms_compile_cache")),
    (_initializers, ("_numpy_seed",)),
    (nn.Cell, ("_self_check", "init_parameters_data", "parameters_and_names")),
    (Parameter, ("_get_base_class", "init_data", "set_data")),
    (Tensor, ("assign_value", "has_init", "init_data")),
    (mindspore, ("_no_grad", "get_rng_state", "set_rng_state")),
)
_checked: list[bool] = []


def require_known_internals() -> None:
    """Refuse a MindSpore that lacks what lazycell relies on; looks once, at the first use.

    Raises:
        LazyCellError: It does; the message names what is missing, and the versions that were tested.
    """
    if _checked:
        return
    missing = [name for owner, names in _NEEDED for name in names if not hasattr(owner, name)]
    if missing:
        raise LazyCellError(
            f"MindSpore {mindspore.__version__} lacks {', '.join(missing)}, which lazycell relies on. lazycell was "
            f"tested on MindSpore {TESTED}: install one of these, or a newer lazycell."
        )
    _checked.append(True)


# ---------------------------------------------------------------------------------------------
# What is running


def in_graph_mode() -> bool:
    """Whether calling a cell compiles it instead of running its ``construct`` in Python."""
    return bool(mindspore.get_context("mode") == mindspore.GRAPH_MODE) and os.getenv("MS_JIT") != "0"


def compiles(method: Callable[..., Any]) -> bool:
    """Whether a cell's method compiles the cell: only ``Cell.__call__`` does, in Graph mode."""
    return method is nn.Cell.__call__ and in_graph_mode()


_API_MODULES = ("mindspore.common.api", "mindspore.graph.api")  # the second: MindSpore 2.9 and later
_PARSER_MODULES = ("mindspore._extends.parse", "mindspore.graph._parse")  # likewise
_RECORDERS = ("_pynative_forward_run", "_pynative_func_grad_forward")  # likewise
_LISTINGS = frozenset(
    ("parameters_and_names", "get_parameters", "trainable_params", "untrainable_params", "parameters_dict")
)
_RUNNERS = frozenset(("__call__", "construct", "watched_call", "watched_construct"))  # the last two: _tracking's


_PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__"))


def _stack(frame: FrameType | None) -> Iterator[FrameType]:
    """A frame and its callers, innermost first.

    MindSpore compiles both sides of a branch in threads of its own, which have no Python stack. What they ask
    counts as asked by the compilation that is under way.
    """
    ours = True
    while frame is not None:
        ours = ours and frame.f_code.co_filename.startswith(_PACKAGE)
        yield frame
        frame = frame.f_back
    if ours:
        for other in sys._current_frames().values():
            yield from (f for f in _callers(other) if _is_compiling(f))


def _callers(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _cell_run_by(frame: FrameType) -> nn.Cell | None:
    code = frame.f_code
    if code.co_name not in _RUNNERS or not code.co_argcount:
        return None
    cell = frame.f_locals.get(code.co_varnames[0])
    return cell if isinstance(cell, nn.Cell) else None


def running_cells(frame: FrameType | None) -> Iterator[nn.Cell]:
    """The cells whose ``__call__`` or ``construct`` a frame is inside of, innermost first."""
    return (cell for cell in map(_cell_run_by, _stack(frame)) if cell is not None)


def _is_compiling(frame: FrameType) -> bool:
    return frame.f_code.co_name == "compile" and _module(frame) in _API_MODULES


def _is_recording(frame: FrameType) -> bool:
    # The executor's own flag, requires_grad(), stays on after an exception in a differentiated function.
    return frame.f_code.co_name in _RECORDERS and _module(frame) == "mindspore.ops.composite.base"


class Forward(Enum):
    """What kind of forward pass a thread is inside of."""

    NONE = "none"
    PYTHON = "python"
    JIT = "a function that is being compiled"
    GRAPH = "a cell that is being compiled"


def forward_running() -> tuple[Forward, nn.Cell | None]:
    """Whether this thread is inside a forward pass, and the cell if one is being compiled as a whole.

    That is: some cell's ``construct`` or ``__call__`` is on the stack, a function or a cell is being compiled,
    or gradients are being recorded. The stack says so exactly, and costs settled cells nothing:
    only the first read of an untouched parameter ever asks.
    """
    for frame in _stack(sys._getframe(1)):
        if _is_compiling(frame):
            cell = frame.f_locals.get("obj")
            return (Forward.GRAPH, cell) if isinstance(cell, nn.Cell) else (Forward.JIT, None)
        if _is_recording(frame) or _cell_run_by(frame) is not None:
            return Forward.PYTHON, None
    return Forward.NONE, None


def finished_graph(frame: FrameType | None) -> tuple[nn.Cell, list[Parameter]] | None:
    """The cell that has just been compiled, and the parameters of its graph.

    MindSpore ends a cell's compilation with ``init_parameters_data()`` on it: a walk through the whole tree, at a
    time when the graph knows its parameters. ``frame`` is the one that may be that walk.
    """
    if frame is None or frame.f_code.co_name != "init_parameters_data":
        return None
    compiling = _asked_by(frame)
    if compiling is None or not _is_compiling(compiling):
        return None
    graphs = compiling.f_locals["self"]._graph_executor
    return compiling.f_locals["obj"], list(graphs.get_params(compiling.f_locals["phase"]).values())


def _asked_by(frame: FrameType) -> FrameType | None:
    """The frame that called another one, not counting lazycell's own."""
    callers = _callers(frame.f_back)
    return next((caller for caller in callers if not caller.f_code.co_filename.startswith(_PACKAGE)), None)


def when_cell_is_compiled(cell: nn.Cell, finished: Callable[[FrameType], None]) -> None:
    """Ask for a call once a cell that is being compiled is compiled, with a frame for `finished_graph`."""
    vars(cell)["init_parameters_data"] = functools.partial(init_parameters_data, cell, finished)


def init_parameters_data(cell: nn.Cell, finished: Callable[[FrameType], None], *args: Any, **kwargs: Any) -> Any:
    """What stands in, once, for the method of this name on a cell that is being compiled."""
    vars(cell).pop("init_parameters_data", None)
    finished(sys._getframe())
    return cell.init_parameters_data(*args, **kwargs)


Forget = Callable[[], None]  # lets what was compiled be compiled anew at its next call


class StaleGraph(Exception):
    """What has just been compiled holds something that has changed meanwhile; it has to be compiled again."""


def _forgetting(cache: set[str], phase: str) -> Forget:
    return lambda: cache.discard(phase)


def settle_graph(frame: FrameType | None, finished: Callable[[Forget], None]) -> None:
    """Have the cell whose compilation `finished_graph` has told of compiled again, until it isn't stale any more.

    Args:
        frame: The frame that `finished_graph` was asked about.
        finished: Called after each compilation. `StaleGraph` asks for another one; after any other exception the
            graph doesn't run, and the next call compiles the cell anew.
    """
    asking = None if frame is None else _asked_by(frame)
    if asking is None:
        return
    compiling = asking.f_locals
    phase, cell = compiling["phase"], compiling["obj"]
    executor = compiling["self"]._graph_executor
    forget = _forgetting(cell.compile_cache, phase)
    while True:
        try:
            finished(forget)
            return
        except StaleGraph:
            arguments = compiling["args"], compiling["kwargs"]
            executor.generate_arguments_key(cell, *arguments, compiling["self"].enable_tuple_broaden)  # prepares them
            executor.compile(cell, *arguments, phase, compiling["jit_config_dict"])
        except BaseException:
            forget()
            raise


def when_function_is_compiled(finished: Callable[[list[Any], list[Parameter], Forget], None]) -> list[Any]:
    """Ask for a call once the function that this thread is compiling is compiled, before its graph first runs.

    MindSpore tells nobody. But its executor goes on to build the graph's arguments, by a method that
    can be replaced on that one object, for that one time.

    Args:
        finished: Called with the list that is returned here, the parameters of the graph, and what lets it be
            forgotten. `StaleGraph` asks for another compilation; after any other exception the graph doesn't run,
            and the next call compiles the function anew.

    Returns:
        A list to note things in; one for each compilation.
    """
    executor = next(filter(_is_compiling, _stack(sys._getframe(1)))).f_locals["self"]
    noted: list[Any] = vars(executor).setdefault("_lazycell_noted", [])
    if "_generate_run_args" in vars(executor):
        return noted
    native = executor._generate_run_args

    def _generate_run_args(*args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(1)
        phase, arguments, named = (caller.f_locals[name] for name in ("phase", "args_list", "kwargs"))
        forget = _forgetting(caller.f_globals["ms_compile_cache"], phase)
        try:
            while "_lazycell_noted" in vars(executor):
                things = vars(executor).pop("_lazycell_noted")
                try:
                    finished(things, list(executor._graph_executor.get_params(phase).values()), forget)
                except StaleGraph:
                    forget()
                    executor.compile(executor.fn.__name__, *arguments, **named)
        except BaseException:
            forget()
            raise
        finally:
            del executor._generate_run_args
            vars(executor).pop("_lazycell_noted", None)
        return native(*args, **kwargs)

    executor._generate_run_args = _generate_run_args
    return noted


def must_be_filled(parameter: Parameter, frame: FrameType | None) -> bool:
    """Whether a parameter that is asked to fill itself has to.

    Not if MindSpore fills a whole tree: for a graph, only those in the graph count; for ``save_checkpoint`` with
    a ``choice_func``, those that are saved are read by themselves. What the user asks for is done.
    ``frame`` is the one that asks.
    """
    listing = frame.f_back if frame is not None else None
    if listing is None or listing.f_code.co_name != "init_parameters_data":
        return True
    asking = _asked_by(listing)
    if asking is None or not _module(asking).startswith("mindspore."):
        return True
    finished = finished_graph(listing)
    return finished is not None and any(parameter is used for used in finished[1])


def listed_by_user(frame: FrameType | None) -> bool:
    """Whether a listing of parameters was asked for by the user's code, not by MindSpore's bookkeeping.

    A cell's first call lists the parameters of its whole subtree to check their names; that must
    not count as reading them. ``frame`` is the one that iterates over a cell's own parameters.
    """
    callers = (caller for caller in _callers(frame) if caller.f_code.co_name not in _LISTINGS)
    asking = next(callers, None)
    return asking is not None and not _module(asking).startswith("mindspore.")


def parser_asks(frame: FrameType | None) -> bool:
    """Whether a frame belongs to MindSpore's graph parser, which must see a cell's real methods."""
    return frame is None or _is_compiling(frame) or _module(frame).startswith(_PARSER_MODULES)


def is_helper(cell: nn.Cell) -> bool:
    """Whether a cell is one that ``recompute()`` makes; it refers to the parameters of the cell it belongs to."""
    return type(cell).__module__ == "mindspore.common.recompute"


def is_bookkeeping(child_name: str) -> bool:
    """Whether a child is MindSpore's own doing: ``recompute()`` keeps a helper cell, used only with gradients."""
    return child_name == "_recompute_cell"


def is_library_layer(cell: nn.Cell) -> bool:
    """Whether a cell is a layer of MindSpore's own, whose children the user didn't choose."""
    containers = (nn.CellList, nn.CellDict, nn.SequentialCell)
    return type(cell).__module__.startswith("mindspore.") and not isinstance(cell, containers)


def prepare_first_call(cell: nn.Cell) -> None:
    """Do what a cell's first call does before ``construct``, except filling its parameters.

    ``Cell.__call__`` would fill all direct parameters, read or not. Once the names are checked, it
    skips both.
    """
    if not cell._is_check_and_refresh:
        cell._self_check()


def was_called(cell: nn.Cell) -> bool:
    """Whether a plain cell has been called before lazycell knew it."""
    return bool(cell._is_check_and_refresh)


# ---------------------------------------------------------------------------------------------
# Storage


class _WithoutStorage(Parameter):  # type: ignore[misc]
    """A spelling of ``Parameter`` whose ``__new__`` leaves initializers alone."""

    init_param = False


def tensor_without_storage(shape: tuple[int, ...], dtype: Any, init: Initializer) -> Tensor:
    """A tensor that knows its initializer and holds no memory until ``init_data()``."""
    return Tensor(shape=shape, dtype=dtype, init=init)


def parameter_without_storage(init: Initializer, like: Parameter) -> Parameter:
    """A new parameter of the shape, dtype, name and flags of another, holding no memory."""
    tensor = tensor_without_storage(like.shape, like.init_mode.dtype, init)
    parameter = Parameter.__new__(_WithoutStorage, tensor)
    Parameter.__init__(parameter, tensor, like.name, like.requires_grad, like.layerwise_parallel)
    if parameter.dtype != like.dtype:
        parameter.set_dtype(like.dtype)
    return parameter


def set_initializer(parameter: Parameter, tensor: Tensor) -> None:
    """Let a parameter without storage take the initializer of a tensor, which may belong to others as well."""
    parameter.init = tensor.init
    parameter.init_mode = tensor_without_storage(tensor.shape, tensor.dtype, tensor.init)


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

_STRUCTURAL = frozenset(
    """
    __class__ __deepcopy__ __del__ __delattr__ __dict__ __dir__ __doc__ __format__ __getattr__ __getattribute__
    __getstate__ __hash__ __init__ __init_subclass__ __len__ __module__ __new__ __parameter__ __repr__ __setattr__
    __sizeof__ __str__ __subclasshook__ __weakref__
    """.split()
)


_guarded: list[bool] = []


def guard_operators(needs_reading: Callable[[object], bool], read: Callable[[Parameter], None]) -> None:
    """Let the operators that neither ask nor refuse (Assign, ReduceSum, Gather) ask, on MindSpore before 2.9.

    They would compute on storage without values, without an error. All of them pass through one method of
    one private object.
    """
    if OPERATORS_ASK or _guarded:
        return
    _guarded.append(True)
    native = _api._pynative_executor.run_op_async

    def run_op_async(primitive: Any, name: str, arguments: Any) -> Any:
        pending = list(arguments)
        while pending:
            argument = pending.pop()
            if isinstance(argument, (list, tuple)):
                pending.extend(argument)
            elif needs_reading(argument):
                read(argument)
        return native(primitive, name, arguments)

    _api._pynative_executor.run_op_async = run_op_async


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


# ---------------------------------------------------------------------------------------------
# Dry runs

DTYPE = type(mindspore.float32).__mro__[2]  # the common base of all dtypes
# The meta device is there from MindSpore 2.9 on. But 2.9.0 corrupts memory on it (a process that has run LSTM or
# BatchNorm there may crash much later), and nothing but the version tells.
HAS_META = hasattr(mindspore, "DeviceCtx") and not mindspore.__version__.startswith("2.9.")
_HOOKS = ("_lazy_forward_pre_hook", "_lazy_forward_hook", "_lazy_backward_pre_hook", "_lazy_backward_hook")


def on_meta() -> AbstractContextManager[Any]:
    """A context in which operators compute shapes only."""
    return cast(AbstractContextManager[Any], mindspore.DeviceCtx("meta"))


class _OnMeta(threading.local):
    active = False


_on_meta = _OnMeta()


@contextmanager
def items_guarded() -> Iterator[None]:
    """Refuse to assign items, and to take items of tensors with values: both crash the process on the meta device."""
    set_item, get_item = Tensor.__setitem__, Tensor.__getitem__

    def __setitem__(self: Tensor, index: Any, value: Any) -> Any:
        if _on_meta.active:
            raise LazyCellError("items are assigned where only shapes are computed.")
        return set_item(self, index, value)

    def __getitem__(self: Tensor, index: Any) -> Any:
        if _on_meta.active and not self.is_meta:
            raise LazyCellError("a tensor with values is indexed where only shapes are computed.")
        return get_item(self, index)

    undo = [replace_attribute(Tensor, name, value) for name, value in (
        ("__setitem__", __setitem__), ("__getitem__", __getitem__),
    )]  # fmt: skip
    _on_meta.active = True
    try:
        yield
    finally:
        _on_meta.active = False
        while undo:
            undo.pop()()


@contextmanager
def moved_to_meta(tensors: list[Tensor]) -> Iterator[None]:
    """Let tensors be on the meta device inside, in place, and afterwards what they were, storage and views alike."""
    kept = []
    try:
        for tensor in tensors:
            keeper = tensor_without_storage((1,), tensor.dtype, _initializers.Zero())
            Tensor.assign_value(keeper, tensor)  # shares the storage, if there is any
            kept.append((tensor, keeper, tensor.init))
            with on_meta():
                Tensor.assign_value(tensor, mindspore.ops.zeros(tensor.shape, tensor.dtype))
            tensor.init = None
        yield
    finally:
        for tensor, keeper, init in kept:
            Tensor.assign_value(tensor, keeper)
            tensor.init = init


def no_gradients() -> AbstractContextManager[Any]:
    """A context in which no gradients are recorded."""
    return cast(AbstractContextManager[Any], mindspore._no_grad())


def has_values(tensor: Tensor) -> bool:
    """Whether a tensor holds values, rather than a shape, an initializer or a place on the meta device."""
    return not (tensor.has_init or getattr(tensor, "is_meta", False))


@contextmanager
def hooks_silenced(cells: list[nn.Cell]) -> Iterator[None]:
    """Forward and backward hooks of some cells don't run inside."""
    kept = [(cell, name, cell.__dict__[name]) for cell in cells for name in _HOOKS if cell.__dict__.get(name)]
    for cell, name, _ in kept:
        cell.__dict__[name] = None
    try:
        yield
    finally:
        for cell, name, hooks in kept:
            cell.__dict__[name] = hooks


def buffers(cell: nn.Cell) -> list[tuple[str, Tensor]]:
    """A cell's own buffers, by name."""
    return [(name, value) for name, value in cell._buffers.items() if value is not None]


def set_buffer(cell: nn.Cell, name: str, value: Tensor) -> None:
    """Put a buffer's value back, in place where the tensor is the same."""
    cell._buffers[name].assign_value(value)


# ---------------------------------------------------------------------------------------------
# Initializers and random numbers

# Draws from NumPy's global stream: none, or exactly one seed (initializer._numpy_seed). Anything else,
# Sparse and users' own initializers included, is drawn when it is built. A test checks both sets.
_NO_DRAW = frozenset(("Zero", "One", "Constant", "Identity", "Dirac"))
_ONE_DRAW = frozenset(
    (
        "Normal", "Uniform", "TruncatedNormal", "XavierNormal", "XavierUniform",
        "HeNormal", "HeUniform", "Orthogonal", "VarianceScaling",
    )
)  # fmt: skip


def _definition(init: Initializer) -> str | None:
    """The MindSpore class whose ``_initialize`` an initializer runs, or None for a user's own."""
    if type(init).__call__ is not Initializer.__call__:
        return None
    function = type(init)._initialize
    if function.__module__ != _initializers.__name__:
        return None
    return str(function.__qualname__.partition(".")[0])


class _Replay(threading.local):
    seed: int = 0


_replay = _Replay()
_recorded_classes: dict[type, type] = {}


def _load_replaying_module() -> ModuleType:
    """A private copy of MindSpore's initializers whose seed is the recorded one.

    Neither MindSpore's own module nor NumPy's global stream is touched while values are drawn, so
    other threads draw undisturbed.
    """
    spec = importlib.util.spec_from_file_location("lazycell._replaying_initializers", _initializers.__file__)
    if spec is None or spec.loader is None:  # pragma: no cover  (MindSpore without Python sources)
        raise ImportError("mindspore.common.initializer has no source to read")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module._numpy_seed = lambda: _replay.seed  # type: ignore[attr-defined]
    return module


_replaying: list[ModuleType] = []


def _replay_values(init: Initializer, array: np.ndarray[Any, Any]) -> None:
    if not _replaying:
        _replaying.append(_load_replaying_module())
    _replay.seed = init._lazycell_seed
    getattr(_replaying[0], init._lazycell_recorded)._initialize(init, array)


def _recorded_class(kind: type) -> type:
    """A subclass of an initializer's class that draws from the seed recorded in the instance."""
    if kind not in _recorded_classes:
        namespace = {"_initialize": _replay_values, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
        _recorded_classes[kind] = type(kind.__name__, (kind,), namespace)
    return _recorded_classes[kind]


def record_draw(tensor: Tensor) -> bool:
    """Draw the seed of a tensor's initializer now, for values that are computed later.

    The tensor gets an initializer of its own, which no later change to the given one can reach.

    Returns:
        False if the initializer isn't known to draw nothing or one seed; nothing was drawn then.
    """
    init = tensor.init
    if hasattr(init, "_lazycell_recorded"):
        return True
    definition = _definition(init) if isinstance(init, Initializer) else None
    if definition not in _NO_DRAW | _ONE_DRAW:
        return False
    recorded = copy.copy(init)
    recorded._lazycell_recorded = definition
    if definition in _ONE_DRAW:
        recorded.__class__ = _recorded_class(type(init))
        recorded._lazycell_seed = int(_initializers._numpy_seed())
    tensor.init = recorded
    return True


class KeptValues(Initializer):  # type: ignore[misc]
    """An initializer that brings back values known beforehand."""

    _lazycell_recorded = "KeptValues"

    def __init__(self, fill: Callable[[np.ndarray[Any, Any]], None]) -> None:
        super().__init__()
        self._fill = fill

    def _initialize(self, array: np.ndarray[Any, Any]) -> None:
        self._fill(array)

    def __deepcopy__(self, memo: dict[int, Any]) -> KeptValues:
        return self


# ---------------------------------------------------------------------------------------------
# Construction


class _InitParamFlag:
    """Stands in for ``Parameter.init_param``: False in threads that defer, True in all others."""

    def __init__(self, deferring: Callable[[], bool]) -> None:
        self._deferring = deferring

    def __get__(self, instance: object, owner: type) -> bool:
        return not self._deferring()


class ConstructionHooks:
    """Tells of every cell and parameter that the current thread constructs, while one is open.

    Args:
        deferring: Whether the current thread wants to know.
        on_cell: Called with each new cell, its ``Cell.__init__`` done.
        on_parameter: Called with each new parameter, its ``Parameter.__init__`` done.
    """

    def __init__(
        self,
        deferring: Callable[[], bool],
        on_cell: Callable[[nn.Cell], None],
        on_parameter: Callable[[Parameter], None],
    ) -> None:
        self._lock = threading.Lock()
        self._open = 0
        self._undo: list[Callable[[], None]] = []
        self._deferring = deferring
        self._on = {nn.Cell: on_cell, Parameter: on_parameter}

    @contextmanager
    def open(self) -> Iterator[None]:
        """Install the hooks for as long as any thread has them open."""
        with self._lock:
            self._open += 1
            if self._open == 1:
                self._install()
        try:
            yield
        finally:
            with self._lock:
                self._open -= 1
                if not self._open:
                    while self._undo:
                        self._undo.pop()()

    def _install(self) -> None:
        self._undo.append(replace_attribute(Parameter, "init_param", _InitParamFlag(self._deferring)))
        for owner in self._on:
            self._undo.append(replace_attribute(owner, "__init__", self._hooked_init(owner)))

    def _hooked_init(self, owner: type) -> Callable[..., None]:
        native, notify, deferring = owner.__init__, self._on[owner], self._deferring  # type: ignore[misc]

        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            native(self, *args, **kwargs)
            if deferring():
                notify(self)

        return __init__


def replace_attribute(owner: type, name: str, value: object) -> Callable[[], None]:
    """Set a class's attribute; the function returned puts back exactly what stood there, if anything did."""
    missing = object()
    before = owner.__dict__.get(name, missing)
    setattr(owner, name, value)

    def undo() -> None:
        if owner.__dict__.get(name) is not value:
            return  # somebody replaced ours; what stands there now is theirs
        if before is missing:
            delattr(owner, name)
        else:
            setattr(owner, name, before)

    return undo


# ---------------------------------------------------------------------------------------------
# Gradients


def gradient_running() -> bool:
    """Whether this thread is inside a function that is being differentiated."""
    return any(map(_is_recording, _callers(sys._getframe(1))))


@contextmanager
def recording_ended() -> Iterator[None]:
    """Stop recording gradients if an exception comes out of a gradient function; MindSpore goes on with it."""
    try:
        yield
    except BaseException:
        if not gradient_running():
            _api._pynative_executor.clear_res()
            _api._pynative_executor.set_grad_flag(False)
        raise


def can_be_captured(tensor: Tensor) -> bool:
    """Whether it makes no difference to gradients if a function takes a tensor from outside, not as an argument.

    It does to parameters, to what another gradient function computed, and to what has hooks.
    """
    return not (isinstance(tensor, Parameter) or tensor.hooks()) and bool(tensor._is_leaf)


_register_hook = Tensor.register_hook
_unrecorded = threading.local()


def _register_hook_anywhere(self: Tensor, hook: Callable[..., Any]) -> Any:
    if getattr(_unrecorded, "active", False) and not self._requires_grad:
        self._requires_grad = True  # MindSpore refuses otherwise; no gradient comes this way in either case
    return _register_hook(self, hook)


class _Hooks:
    """Counts who needs `Tensor.register_hook` to be lenient."""

    lock = threading.Lock()
    users = 0
    undo: Callable[[], None]


@contextmanager
def not_differentiated(tensors: list[Tensor]) -> Iterator[None]:
    """Let tensors not be what gradients are computed for, inside.

    A gradient function flags every tensor it is given, for good; the flag makes MindSpore record all that is computed
    from the tensor, and keep the activations. Hooks on what isn't recorded are accepted, and not called, as before.
    """
    flagged = [tensor for tensor in tensors if tensor._requires_grad]
    with _Hooks.lock:
        _Hooks.users += 1
        if _Hooks.users == 1:
            _Hooks.undo = replace_attribute(Tensor, "register_hook", _register_hook_anywhere)
    _unrecorded.active = True
    try:
        for tensor in flagged:
            tensor._requires_grad = False
        yield
    finally:
        for tensor in flagged:
            tensor._requires_grad = True
        _unrecorded.active = False
        with _Hooks.lock:
            _Hooks.users -= 1
            if not _Hooks.users:
                _Hooks.undo()


class Reached:
    """Which parameters a gradient arrives at, while MindSpore computes the gradients of a list of them.

    MindSpore calls a parameter's hooks when its gradient has arrived, and at the end, in the order of the list, those
    of the parameters that none has arrived at, with zeros. A parameter that nobody uses, first in the list, marks the
    border.
    """

    def __init__(self) -> None:
        self.border = Parameter(Tensor(0.0, mindspore.float32), name="lazycell_border")
        self._handles: list[Any] = []
        self._called: list[int] = []

    def watch(self, parameters: list[Parameter]) -> None:
        """Begin; the gradients of these, after that of `border`, are about to be computed."""
        self._parameters = parameters
        for parameter in (self.border, *parameters):
            self._handles.append(parameter.register_hook(self._noting(id(parameter))))

    def _noting(self, key: int) -> Callable[[Tensor], Tensor]:
        def note(gradient: Tensor) -> Tensor:  # MindSpore takes nothing but a function
            self._called.append(key)
            return gradient

        return note

    def end(self) -> list[bool]:
        """Whether a gradient has arrived at each parameter."""
        while self._handles:
            self._handles.pop().remove()
        border = id(self.border)
        if border not in self._called:
            return [True] * len(self._parameters)
        arrived = set(self._called[: self._called.index(border)])
        return [id(parameter) in arrived for parameter in self._parameters]


class ForwardGraphs:
    """Which parameters the graphs of a function hold; it is compiled once more for that, and never run.

    The graph of its gradients holds every parameter that gradients are asked for, used or not.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        def forward(*args):  # type: ignore[no-untyped-def]  # MindSpore's compiler parses this
            return function(*args)

        self._executor = _api._JitExecutor(forward, time.time_ns())

    def parameters(self, args: tuple[Any, ...]) -> list[Parameter]:
        """The parameters of the graph that these arguments run."""
        phase = self._executor.compile("forward", *args)
        return list(self._executor._graph_executor.get_params(phase).values())


# ---------------------------------------------------------------------------------------------
# Freezing

_STATISTICS = frozenset(("moving_mean", "moving_variance", "running_mean", "running_var"))
_ADD_FLAGS = "add_flags_recursive"  # how set_train() reaches a cell


def has_statistics(cell: nn.Cell) -> bool:
    """Whether a cell keeps moving statistics, as batch normalization does."""
    return not _STATISTICS.isdisjoint(cell._params) or not _STATISTICS.isdisjoint(cell._buffers)


def _without_training(cell: nn.Cell, **flags: Any) -> nn.Cell:
    vars(cell)["_lazycell_training"] = flags.pop("training", vars(cell)["_lazycell_training"])
    return cast(nn.Cell, type(cell).add_flags_recursive(cell, **flags))


def statistics_are_still(cell: nn.Cell) -> bool:
    """Whether `hold_statistics` is in force."""
    return _ADD_FLAGS in vars(cell)


def hold_statistics(cell: nn.Cell) -> None:
    """Let a cell use its moving statistics, and leave them as they are, also after ``set_train(True)``."""
    if not statistics_are_still(cell):
        vars(cell)["_lazycell_training"] = cell.training
        cell.add_flags_recursive(training=False)
        vars(cell)[_ADD_FLAGS] = functools.partial(_without_training, cell)  # copies of the cell get one of their own
        if getattr(cell, "use_batch_statistics", None):
            vars(cell)["_lazycell_batch"] = True
            cell.use_batch_statistics = False


def release_statistics(cell: nn.Cell) -> None:
    """Undo `hold_statistics`: the cell trains if its net does."""
    if statistics_are_still(cell):
        del vars(cell)[_ADD_FLAGS]
        cell.add_flags_recursive(training=vars(cell).pop("_lazycell_training"))
        if vars(cell).pop("_lazycell_batch", False):
            cell.use_batch_statistics = True


def forget_graphs(cells: list[nn.Cell]) -> None:
    """Have all graphs that these cells are in, and all jitted functions, compiled anew at their next call.

    A graph belongs to the cell that was called, of which those inside know nothing: all live cells are looked at.
    """
    wanted = set(map(id, cells))
    for thing in gc.get_objects():
        if issubclass(type(thing), nn.Cell) and getattr(thing, "compile_cache", None):
            if not wanted.isdisjoint(id(cell) for _, cell in thing.cells_and_names()):
                thing.compile_cache.clear()
    _api.ms_compile_cache.clear()


# ---------------------------------------------------------------------------------------------
# Classes


def subclass_unseen(base: type, namespace: dict[str, Any]) -> type:
    """Subclass a class without running its ``__init_subclass__`` or its metaclass's ``__new__``.

    Model registries hang on both, and must not see a class that the user never wrote.

    Raises:
        TypeError: The class can't be subclassed this way (its instances have another layout).
    """
    made = type.__new__(type(base), base.__name__, (nn.Cell,), namespace)
    made.__bases__ = (base,)
    return made


# ---------------------------------------------------------------------------------------------
# Optimizers


def parameters_held(cell: nn.Cell) -> list[Parameter]:
    """The parameters that a cell and all below it hold, in whatever attribute."""
    found: dict[int, Parameter] = {}

    def note(parameter: Parameter) -> Parameter:
        found[id(parameter)] = parameter
        return parameter

    _map_parameters(cell, note)
    return list(found.values())


def replace_parameters(cell: nn.Cell, table: dict[int, Parameter]) -> None:
    """Let a cell and all below it hold other parameters; ``table`` gives them by the id of those to be replaced."""
    _map_parameters(cell, lambda parameter: table.get(id(parameter), parameter))


def _map_parameters(cell: nn.Cell, replace: Callable[[Parameter], Parameter]) -> None:
    for _, current in cell.cells_and_names():
        for name, parameter in list(current._params.items()):
            if parameter is not None:
                current._params[name] = replace(parameter)
        for name, value in list(vars(current).items()):
            if name not in ("_params", "_cells"):
                vars(current)[name] = _mapped(value, replace)


def _mapped(value: Any, replace: Callable[[Parameter], Parameter]) -> Any:
    if isinstance(value, Parameter):
        return replace(value)
    if type(value) is dict:
        value.update((key, _mapped(item, replace)) for key, item in list(value.items()))
        return value
    if type(value) is list:
        value[:] = [_mapped(item, replace) for item in value]
        return value
    if type(value) in (tuple, ParameterTuple):
        mapped = [_mapped(item, replace) for item in value]
        return value if all(map(operator.is_, mapped, value)) else type(value)(mapped)
    return value
