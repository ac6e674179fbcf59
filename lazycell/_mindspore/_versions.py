"""Which MindSpore this is, and whether it has what lazycell relies on."""

from __future__ import annotations

from typing import Any

import mindspore
from mindspore import Parameter, Tensor, nn
from mindspore.common import initializer as _initializers

from lazycell._errors import LazyCellError

try:  # MindSpore 2.9 and later
    from mindspore.graph import api as api
except ImportError:
    from mindspore.common import api as api

TESTED = "2.7.1, 2.8.0, 2.9.0 and 2.10.0"

# What lazycell relies on beyond MindSpore's documentation; other versions may have renamed it.
_NEEDED: tuple[tuple[Any, tuple[str, ...]], ...] = (
    (api, ("_pynative_executor", "ms_compile_cache")),
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
