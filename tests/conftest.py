"""Options and fixtures for the whole suite."""

from __future__ import annotations

import os

os.environ.setdefault("GLOG_v", "3")  # MindSpore's own log: errors only

import mindspore  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402

from lazycell import _mindspore as internals  # noqa: E402

settings.register_profile(
    "lazycell",
    deadline=None,  # machines are shared and noisy
    max_examples=int(os.environ.get("LAZYCELL_EXAMPLES", "40")),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    print_blob=True,
)
settings.load_profile("lazycell")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let the suite run on another device."""
    parser.addoption("--device-target", default="CPU", help="MindSpore device to run on: CPU, GPU or Ascend")
    parser.addoption("--update-golden", action="store_true", help="write the files in tests/golden anew")


def pytest_configure(config: pytest.Config) -> None:
    """Choose the device before anything runs."""
    mindspore.set_device(config.getoption("--device-target"))


@pytest.fixture(autouse=True)
def pynative() -> None:
    """Every test starts in PyNative mode, from the same random numbers, with no recording left on by a failure."""
    internals.end_forgotten_recording()
    mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
    mindspore.set_seed(0)
    np.random.seed(0)
