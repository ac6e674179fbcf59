"""What laziness costs and saves; prints one table.

    python benchmarks/core.py

Times are ratios: the rivals take turns in one process, and the median over many rounds is quoted, with quartiles.
"""

from __future__ import annotations

import gc
import os
import platform
import statistics
import time
import warnings
from collections.abc import Callable

os.environ.setdefault("GLOG_v", "3")

import mindspore as ms  # noqa: E402
import numpy as np  # noqa: E402
from mindspore import Tensor, nn  # noqa: E402

import lazycell  # noqa: E402

warnings.simplefilter("ignore")


def seconds(function: Callable[[], object]) -> float:
    """How long one call takes."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def interleaved(first: Callable[[], object], second: Callable[[], object], rounds: int) -> str:
    """The median ratio of two functions' times, measured in turns, with quartiles."""
    gc.collect()
    gc.disable()
    ratios = []
    for index in range(rounds):
        if index % 2:
            a, b = seconds(first), seconds(second)
        else:
            b, a = seconds(second), seconds(first)
        ratios.append(a / b)
    gc.enable()
    low, middle, high = statistics.quantiles(ratios, n=4)
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"


def settled(layers: int, base: type[nn.Cell], dead: int = 0) -> nn.Cell:
    """A net of live and dead layers that has run once."""

    class Net(base):
        def __init__(self) -> None:
            super().__init__()
            self.live = nn.SequentialCell([nn.Dense(8, 8) for _ in range(layers)])
            if dead:
                self.dead = nn.SequentialCell([nn.Dense(8, 8) for _ in range(dead)])

        def construct(self, x: Tensor) -> Tensor:
            return self.live(x)

    net = Net()
    net(ms.ops.ones((1, 8)))
    return net


def settled_overhead() -> None:
    """A call of a settled net with a dead layer per live one, to the plain net without them."""
    x = ms.ops.ones((1, 8))
    for layers, rounds in ((1, 4000), (10, 2000), (100, 400)):
        lazy, plain = settled(layers, lazycell.LazyCell, layers), settled(layers, nn.Cell)
        print(f"settled call, {layers:>3} live and {layers:>3} dead layers, to plain:  "
              f"{interleaved(lambda: lazy(x), lambda: plain(x), rounds)}")  # fmt: skip


def settled_graph_overhead() -> None:
    """The same in Graph mode, to the plain net with the same dead layers: MindSpore visits every cell in each call."""
    x = ms.ops.ones((1, 8))
    ms.set_context(mode=ms.GRAPH_MODE)
    for layers, rounds in ((1, 4000), (20, 2000)):
        lazy, plain = settled(layers, lazycell.LazyCell, layers), settled(layers, nn.Cell, layers)
        print(f"settled call in Graph mode, {layers:>2} live and {layers:>2} dead layers, to plain with both:  "
              f"{interleaved(lambda: lazy(x), lambda: plain(x), rounds)}")  # fmt: skip
    ms.set_context(mode=ms.PYNATIVE_MODE)


class Wide(lazycell.LazyCell):
    """Many small layers side by side."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.live = nn.CellList([nn.Dense(2, 2) for _ in range(layers)])

    def construct(self, x: Tensor) -> Tensor:
        for layer in self.live:
            layer(x)
        return x


def scale() -> None:
    """Construction, first forward and listing per layer, 8000 layers to 500."""
    x, per_layer = ms.ops.ones((1, 2)), {}
    for _ in range(5):
        for layers in (500, 8000):
            gc.collect()
            made: list[Wide] = []
            times = {
                "construction": seconds(lambda: made.append(Wide(layers))),
                "first forward": seconds(lambda: made[0](x)),
                "listing": seconds(lambda: made[0].trainable_params()),
                "listing by plain MindSpore": seconds(lambda: nn.Cell.trainable_params(made[0])),
            }
            for name, value in times.items():
                per_layer.setdefault((name, layers), []).append(value / layers)
    for name in times:
        small, large = (statistics.median(per_layer[name, layers]) for layers in (500, 8000))
        micro = f"({large * 1e6:.0f} us to {small * 1e6:.0f} us)"
        print(f"{name} per layer, 8000 layers to 500:  {large / small:.2f}  {micro}")


def stack(base: type[nn.Cell], layers: int) -> nn.Cell:
    """A net of large layers."""

    class Net(base):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.CellList([nn.Dense(2048, 2048) for _ in range(layers)])

    return Net()


def construction() -> None:
    """50 x Dense(2048, 2048): LazyCell to the meta device, and to eager."""

    def meta() -> None:
        with ms.DeviceCtx("meta"):
            stack(nn.Cell, 50)

    def lazy() -> None:
        stack(lazycell.LazyCell, 50)

    lazy()
    if hasattr(ms, "DeviceCtx"):  # MindSpore 2.9 and later
        meta()
        print(f"construction of 50 x Dense(2048, 2048), to the meta device:  {interleaved(lazy, meta, 20)}")
    print(f"construction of 50 x Dense(2048, 2048), to eager:  {interleaved(lazy, lambda: stack(nn.Cell, 50), 5)}")


def main() -> None:
    """Run all of it."""
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, "
          f"MindSpore {ms.__version__}, NumPy {np.__version__}")  # fmt: skip
    print("ratios of times: median (quartiles)")
    settled_overhead()
    settled_graph_overhead()
    scale()
    construction()


if __name__ == "__main__":
    main()
    os._exit(0)  # MindSpore prints hundreds of ignored errors when nets outlive its modules
