"""Take turns, in one process or between several; weigh a process; name the machine."""

from __future__ import annotations

import gc
import importlib.metadata
import importlib.util
import multiprocessing
import os
import platform
import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any

Rival = Callable[[], float]  # does its part once, and gives the seconds it took
Times = dict[str, list[float]]


# ---------------------------------------------------------------------------------------------
# Time


def timed(function: Callable[[], object]) -> Rival:
    """A rival of this process."""

    def rival() -> float:
        start = time.perf_counter()
        function()
        return time.perf_counter() - start

    return rival


def interleaved(rivals: Mapping[str, Rival], rounds: int) -> Times:
    """The seconds of every rival in every round, in which they come in any order."""
    names, random = list(rivals), Random(0)
    times: Times = {name: [] for name in names}
    gc.collect()
    gc.disable()
    for index in range(rounds):
        for name in random.sample(names, len(names)):  # what runs before may leave caches to one's liking
            times[name].append(rivals[name]())
        if index % 16 == 15:
            gc.collect(1)
    gc.enable()
    return times


def rebuilt(build: Callable[[str], Rival], names: Sequence[str], builds: int, rounds: int) -> Times:
    """The same over several builds of each rival: where weights come to lie in memory costs up to 5 % either way."""
    times: Times = {name: [] for name in names}
    for index in range(builds):
        start = index % len(names)
        rivals = {name: build(name) for name in (*names[start:], *names[:start])}
        for name, values in interleaved({name: rivals[name] for name in names}, rounds).items():
            times[name] += values
    return times


def spread(values: list[float]) -> tuple[float, float, float]:
    """Lower quartile, median, upper quartile."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def ratios(times: Times, name: str, to: str) -> list[float]:
    """One rival's time by another's, round by round."""
    return [a / b for a, b in zip(times[name], times[to], strict=True)]


def ratio(times: Times, name: str, to: str) -> str:
    """The same as text: the median and the quartiles."""
    low, middle, high = spread(ratios(times, name, to))
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"


def milliseconds(times: Times, name: str) -> str:
    """The median time as text."""
    return f"{statistics.median(times[name]) * 1e3:.3g} ms" if name in times else "not installed"


# ---------------------------------------------------------------------------------------------
# Memory


def _status(key: str) -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(key))


def peak(function: Callable[[], object]) -> int:
    """How far one call raises the peak of this process's memory, in bytes. Linux only."""
    gc.collect()
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak starts again from what is held now
    before = _status("VmRSS")
    function()
    return _status("VmHWM") - before


# ---------------------------------------------------------------------------------------------
# Processes


class Worker:
    """A process of its own, which runs what it is given when its turn comes.

    Args:
        mindspore: Whether it is for MindSpore, rather than for another framework. Both read ``GLOG_v``, to
            opposite effects: 3 silences MindSpore and makes Paddle tell all.
    """

    def __init__(self, mindspore: bool = True) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
        before = os.environ.get("GLOG_v")
        os.environ["GLOG_v"] = "3" if mindspore else "0"
        self._process.start()
        theirs.close()
        os.environ.update({} if before is None else {"GLOG_v": before})

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *exc: object) -> None:
        self._process.kill()

    def __call__(self, function: Callable[..., Any], *args: Any) -> Any:
        """What a function of a module gives there."""
        self._connection.send((function, args))
        result = self._connection.recv()
        if isinstance(result, BaseException):
            raise result
        return result

    def hold(self, build: Callable[..., Callable[[], object]], *args: Any) -> Rival:
        """Build something there that is to be called in turns."""
        self(_hold, build, args)
        return lambda: float(self(_seconds_of_held))


_held: list[Callable[[], object]] = []


def _hold(build: Callable[..., Callable[[], object]], args: tuple[Any, ...]) -> None:
    _held[:] = [build(*args)]
    gc.collect()
    gc.disable()


def _seconds_of_held() -> float:
    return timed(_held[0])()


def _serve(connection: Any) -> None:
    warnings.simplefilter("ignore")
    while True:
        try:
            function, args = connection.recv()
        except EOFError:
            os._exit(0)
        try:
            connection.send(function(*args))
        except BaseException as error:
            connection.send(RuntimeError(f"{function.__module__}.{function.__name__}{args}: {error!r}"))


def in_process(function: Callable[..., Any], *args: Any, mindspore: bool = True) -> Any:
    """What a function of a module gives in a new process."""
    with Worker(mindspore) as worker:
        return worker(function, *args)


def is_installed(framework: str) -> bool:
    """Whether an outside framework can be measured here."""
    return importlib.util.find_spec(framework) is not None


# ---------------------------------------------------------------------------------------------
# Where it was measured


def environment() -> str:
    """Machine and versions."""
    packages = ("mindspore", "numpy", "mindcv", "torch", "jax", "paddlepaddle")
    found = [f"{name} {importlib.metadata.version(name)}" for name in packages if _has(name)]
    parts = (platform.machine(), f"{os.cpu_count()} cores", "CPU", f"Python {platform.python_version()}", *found)
    return ", ".join(parts)


def _has(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
