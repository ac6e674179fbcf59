"""What a step costs when the first s layers are frozen: MindSpore, lazycell, and the limit; prints tables.

    python benchmarks/freezing.py

The limit is the frozen trunk run outside the differentiated function. Times are ratios: the rivals take turns in one
process, and the median over many rounds is quoted, with quartiles. Memory is how far the first step on eight times the
batch raises the peak of a process, each rival in one of its own; MindSpore's pool never shrinks, so that a second step
would not show.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import warnings
from collections.abc import Callable

os.environ.setdefault("GLOG_v", "3")

import mindspore as ms  # noqa: E402
import numpy as np  # noqa: E402
from core import interleaved  # noqa: E402
from mindspore import Tensor, nn  # noqa: E402

import lazycell  # noqa: E402

warnings.simplefilter("ignore")
MODES = {"PyNative": ms.PYNATIVE_MODE, "Graph": ms.GRAPH_MODE}


class Chain(lazycell.LazyCell):
    """Stages that run one after the other; from ``start`` on, if that is asked."""

    def __init__(self, stages: list[nn.Cell]) -> None:
        super().__init__()
        self.stages = nn.CellList(stages)

    def construct(self, x: Tensor, start: int = 0, end: int | None = None) -> Tensor:
        for stage in self.stages[start:end]:
            x = stage(x)
        return x


def mlp(batch: int = 512) -> tuple[nn.Cell, Tensor]:
    """12 x Dense(768) with ReLU."""

    class Mlp(Chain):
        def __init__(self) -> None:
            super().__init__([nn.SequentialCell(nn.Dense(768, 768), nn.ReLU()) for _ in range(12)])

    return Mlp(), Tensor(np.random.rand(batch, 768).astype(np.float32))


def resnet18(batch: int = 4) -> tuple[nn.Cell, Tensor]:
    """mindcv's resnet18 as six stages: stem, four of blocks, head; images of (3, 32, 32)."""
    from mindcv.models import create_model

    class Resnet(Chain):
        def __init__(self) -> None:
            net = create_model("resnet18", num_classes=10)
            stem = nn.SequentialCell(net.conv1, net.bn1, net.relu, net.max_pool)
            head = nn.SequentialCell(net.pool, net.classifier)
            super().__init__([stem, net.layer1, net.layer2, net.layer3, net.layer4, head])

    return Resnet(), Tensor(np.random.rand(batch, 3, 32, 32).astype(np.float32))


NETS = {"MLP": mlp, "resnet18": resnet18}


Step = Callable[[Tensor], tuple[Tensor, ...]]


def rivals(net: nn.Cell, x: Tensor, frozen: int) -> dict[str, Step]:
    """A gradient step of each rival, over one net whose first stages are frozen."""
    net.set_train(False)  # the limit runs the trunk in a call of its own, which would move statistics
    net(x)
    if frozen:
        lazycell.freeze(*net.stages[:frozen])
    weights = list(net.trainable_params())

    def whole(x: Tensor) -> Tensor:
        return net(x).sum()

    class Trunk(nn.Cell):
        def construct(self, x: Tensor) -> Tensor:
            return net(x, 0, frozen)

    def head(h: Tensor) -> Tensor:
        return net(h, frozen).sum()

    def done(result: tuple[Tensor, tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        for tensor in (result[0], *result[1]):
            tensor.asnumpy()
        return result[1]

    trunk, head_grad = Trunk(), ms.value_and_grad(head, None, weights)
    native, lazy = ms.value_and_grad(whole, None, weights), lazycell.value_and_grad(whole, None, weights)
    return {
        "lazycell": lambda x: done(lazy(x)),
        "MindSpore": lambda x: done(native(x)),
        "the limit": lambda x: done(head_grad(trunk(x) if frozen else x)),
    }


def status(key: str) -> int:
    """An entry of this process's status, in bytes."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(key))


def peak(step: Step, x: Tensor) -> int:
    """How far one call raises the peak of this process's memory."""
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # Linux: the peak starts again from what is held now
    before = status("VmRSS")
    step(x)
    return status("VmHWM") - before


def peak_in_process(net: str, mode: str, frozen: int, rival: str) -> int:
    """The same in a new process."""
    command = [sys.executable, __file__, json.dumps([net, mode, frozen, rival])]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(done.stdout.split()[-1])


def main() -> None:
    """Run all of it."""
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, "
          f"MindSpore {ms.__version__}, NumPy {np.__version__}")  # fmt: skip
    print("| net | mode | frozen | time to the limit | MindSpore's | peak memory to the limit | MindSpore's |")
    print("|---|---|---|---|---|---|---|")
    for net, stages, rounds in (("MLP", 12, 21), ("resnet18", 6, 9)):
        for mode in MODES:
            for frozen in range(stages) if mode == "PyNative" else (0, stages // 2, stages - 1):
                ms.set_context(mode=MODES[mode])
                made, x = NETS[net]()
                steps = rivals(made, x, frozen)
                gradients = [step(x) for step in steps.values()]
                for one, *others in zip(*gradients, strict=True):
                    assert all((one.asnumpy() == other.asnumpy()).all() for other in others)
                times = [
                    interleaved(lambda: steps[rival](x), lambda: steps["the limit"](x), rounds)  # noqa: B023
                    for rival in ("lazycell", "MindSpore")
                ]
                peaks = {rival: peak_in_process(net, mode, frozen, rival) for rival in steps}
                least = peaks["the limit"]
                memory = [f"{peaks[rival] / least:.2f}" for rival in ("lazycell", "MindSpore")]
                print(f"| {net} | {mode} | {frozen} of {stages} | {' | '.join((*times, *memory))} |", flush=True)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        asked_net, asked_mode, asked_frozen, asked_rival = json.loads(sys.argv[1])
        ms.set_context(mode=MODES[asked_mode])
        asked, small = NETS[asked_net](1)
        asked_step = rivals(asked, small, asked_frozen)[asked_rival]
        asked_step(small)
        print(peak(asked_step, NETS[asked_net](8 * (512 if asked_net == "MLP" else 4))[1]))
    else:
        main()
    sys.stdout.flush()
    os._exit(0)  # MindSpore prints hundreds of ignored errors when nets outlive its modules
