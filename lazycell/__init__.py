"""Lazy parameters for MindSpore: only what ``construct`` uses is allocated, trained and reported."""

from lazycell import distributed, layers
from lazycell._cell import LazyCell, materialize, optional, release, track
from lazycell._dry_run import dry_run, spec
from lazycell._errors import LazyCellError, LazyCellWarning, UntouchedError, UntouchedWarning, UnusedLayerWarning
from lazycell._freezing import freeze, freeze_state, load_freeze_state, unfreeze
from lazycell._gradient import grad, value_and_grad
from lazycell._layers import LayerRecord, LayerState
from lazycell._live import TouchedParameters, trainable_params
from lazycell._optimizer import LazyOptimizer
from lazycell._patch import PatchHandle, is_patched, patch, unpatch
from lazycell._registry import LayerRegistry, registry
from lazycell._report import report

__version__ = "0.1.0"

__all__ = [
    "LayerRecord",
    "LayerRegistry",
    "LayerState",
    "LazyCell",
    "LazyCellError",
    "LazyCellWarning",
    "LazyOptimizer",
    "PatchHandle",
    "TouchedParameters",
    "UntouchedError",
    "UntouchedWarning",
    "UnusedLayerWarning",
    "distributed",
    "dry_run",
    "freeze",
    "freeze_state",
    "grad",
    "is_patched",
    "layers",
    "load_freeze_state",
    "materialize",
    "optional",
    "patch",
    "registry",
    "release",
    "report",
    "spec",
    "track",
    "trainable_params",
    "unfreeze",
    "unpatch",
    "value_and_grad",
]
