"""``python -m lazycell run``: a script runs as Python runs it, and its nets are reported on."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

import lazycell

FACTS = """
import json, os, pickle, sys
from pathlib import Path
class Own:
    pass
main = sys.modules["__main__"]
spec = main.__spec__
print(json.dumps({
    "argv": sys.argv, "path": sys.path[0], "name": __name__, "file": __file__, "package": __package__,
    "spec": spec and spec.name, "main": main.Own is Own, "pickle": pickle.loads(pickle.dumps(Own)) is Own,
    "folder": os.getcwd(), "loader": __loader__.get_filename(__name__ if spec is None else spec.name),
    "globals": sorted(name for name in globals()), "standard input": sys.stdin.read(), "future": "%s" % (1,),
    "builtins": type(__builtins__).__name__,
    "annotations": repr(int if False else (lambda: 0).__code__.co_flags & 0x1000000),
}))
"""

FIRST_REPORT = '''
import numpy as np
import mindspore
from mindspore import Tensor, nn


class Model(nn.Cell):
    def __init__(self):
        super().__init__()
        self.conv1_mutated = nn.Conv2dTranspose(3, 3, 7, stride=2, pad_mode="pad", padding=0, has_bias=True)
        self.pool1_mutated = nn.MaxPool2d(8, 2, pad_mode="pad")
        self.conv2_mutated = nn.Conv2dTranspose(3, 2, 1, has_bias=True)
        self.relu1_mutated = nn.HSwish()
        self.conv3_mutated = nn.Conv2dTranspose(2, 3, 1, has_bias=True)
        self.relu2_mutated = nn.HSwish()
        self.conv4_mutated = nn.Conv2dTranspose(2, 3, 3, pad_mode="pad", padding=1, has_bias=True)
        self.tail_flatten = nn.Flatten()
        self.tail_fc = nn.Dense(149187, 1000)

    def construct(self, x):
        x = self.conv1_mutated(x)
        x = self.pool1_mutated(x)
        x = self.conv2_mutated(x)
        x = self.relu1_mutated(x)
        x = self.conv4_mutated(x)
        return self.tail_fc(self.tail_flatten(x))


def main():
    model = Model()
    loss_fn = nn.CrossEntropyLoss()
    image = Tensor(np.random.default_rng(0).random((1, 3, 224, 224), np.float32))
    label = Tensor([3], mindspore.int32)

    def forward_fn(image, label):
        logits = model(image)
        return loss_fn(logits, label), logits

    grad_fn = mindspore.value_and_grad(forward_fn, None, model.trainable_params(), has_aux=True)
    _, gradients = grad_fn(image, label)
    for parameter, gradient in zip(model.trainable_params(), gradients):
        print(parameter.name)


if __name__ == "__main__":
    main()
'''
NO_NET = "lazycell: no net was run under lazycell.patch().\n"
EIGHT = [f"{layer}.{part}" for layer in ("conv1_mutated", "conv2_mutated", "conv4_mutated", "tail_fc")
         for part in ("weight", "bias")]  # fmt: skip


def python(*arguments: str, folder: Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run Python in a folder, with this lazycell."""
    package = str(Path(lazycell.__file__).parents[1])
    env = {**os.environ, "PYTHONPATH": package, "GLOG_v": "4"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300, **options)


def run(*arguments: str, folder: Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run something by ``python -m lazycell run``."""
    return python("-m", "lazycell", "run", *arguments, folder=folder, **options)


@pytest.mark.parametrize(
    "how",
    ["script.py", "folder/script.py", "./folder/../script.py", "-- script.py", "-m package.module", "-mpackage.module",
     "-m package", "-m script", "folder", "folder/../folder/", "zip"],
)
def test_a_program_sees_what_it_sees_without(how: str, tmp_path: Path) -> None:
    """Arguments, names, paths, folder, standard input; options after the program's name are its own."""
    (tmp_path / "package").mkdir()
    (tmp_path / "folder").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    for name in ("script.py", "folder/script.py", "folder/__main__.py", "package/module.py", "package/__main__.py"):
        (tmp_path / name).write_text(FACTS)
    with zipfile.ZipFile(tmp_path / "zip", "w") as archive:
        archive.writestr("__main__.py", FACTS)
    for arguments in (["one", "--report", "x.html", "--fail-on-unused", "--", "-m", "two words"], ["--", "-h"]):
        expected = python(*how.split(), *arguments, folder=tmp_path, input="typed")
        done = run(*how.split(), *arguments, folder=tmp_path, input="typed")
        assert expected.returncode == done.returncode == 0, done.stderr
        assert json.loads(done.stdout) == json.loads(expected.stdout)
        assert done.stderr == NO_NET


ENDS = {
    "quietly": "pass",
    "with a number": "import sys; sys.exit(5)",
    "with a text": "import sys; sys.exit('so it ends')",
    "with None": "import sys; sys.exit()",
    "with an error": "def deep():\n    raise ValueError('boom') from KeyError('cause')\n\ndeep()",
    "with a mistake in its syntax": "def (:",
    "interrupted": "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nimport time; time.sleep(60)",
    "terminated": "import os, signal\nos.kill(os.getpid(), signal.SIGTERM)\nimport time; time.sleep(60)",
    "at once": "import os; os._exit(9)",
    "with threads left": "import threading, time\n"
                         "threading.Thread(target=lambda: (time.sleep(0.5), print('done', flush=True))).start()",
    "with a hook": "import sys\nsys.excepthook = lambda *a: print('hooked', a[0].__name__)\n1 / 0",
    "with a hook that shows the traceback": "import sys, traceback\n"
                                            "def hook(kind, error, trace):\n"
                                            "    print(traceback.format_tb(trace), sys.last_traceback is trace)\n"
                                            "    print(traceback.format_tb(error.__traceback__))\n"
                                            "sys.excepthook = hook\n"
                                            "def deep():\n    return 1 / 0\n\ndeep()",
    "interrupted, with a hook": "import sys\nsys.excepthook = lambda *a: print('hooked', a[0].__name__, flush=True)\n"
                                "raise KeyboardInterrupt",
    "with a function to call at exit": "import atexit; atexit.register(print, 'last')",
    "with a pool of threads left": "from concurrent.futures import ThreadPoolExecutor\n"
                                   "pool = ThreadPoolExecutor(2)\npool.submit(print, 'worked')",
    "by a pipe that breaks": "raise BrokenPipeError(32, 'Broken pipe')",
    "with standard error closed": "import sys; sys.stderr.close()",
    "without standard error": "import sys; sys.stderr = None",
    "with standard error replaced": "import io, sys; sys.stderr = io.StringIO()",
    "with standard error gone": "import os; os.close(2)",
    "with standard error full": "import os; os.dup2(os.open('/dev/full', os.O_WRONLY), 2)",
    "in another folder": "import os, tempfile; os.chdir(tempfile.mkdtemp())",
    "in a folder that is gone": "import os, tempfile; f = tempfile.mkdtemp(); os.chdir(f); os.rmdir(f)",
    "in two processes": "import os, sys\nif os.fork():\n    os.wait(); print('parent')\nelse:\n    print('child')\n"
                        "    sys.stdout.flush(); sys.exit(0)",
}
PACKAGES = {"needs/__init__.py": "import not_installed", "needs/inner.py": "", "breaks/__init__.py": "1 / 0",
            "breaks/inner.py": "", "says/__init__.py": "import sys; print(sys.argv)",
            "says/inner.py": "print(__name__)", "syntax/__init__.py": "", "syntax/inner.py": "def (:"}  # fmt: skip


@pytest.mark.parametrize("how", ENDS)
def test_a_program_ends_as_it_does_without(how: str, tmp_path: Path) -> None:
    """Exit code, output and traceback."""
    (tmp_path / "script.py").write_text(ENDS[how])
    expected = python("script.py", folder=tmp_path)
    done = run("script.py", folder=tmp_path)
    assert (done.returncode, done.stdout) == (expected.returncode, expected.stdout)
    assert done.stderr.replace(NO_NET, "") == expected.stderr


@pytest.mark.parametrize("name", ["needs", "breaks", "says", "syntax"])
def test_a_package_around_a_module(name: str, tmp_path: Path) -> None:
    """What it does when it is imported, and how it fails, is what Python shows; but for Python's own frames."""
    for file, text in PACKAGES.items():
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(text)
    expected, done = (command("-m", f"{name}.inner", "one", folder=tmp_path) for command in (python, run))
    assert (done.returncode, done.stdout) == (expected.returncode, expected.stdout)
    own = re.compile(r'  File "<frozen runpy>".*\n|  File ".*/runpy.py".*\n    .*\n')
    assert done.stderr.replace(NO_NET, "") == own.sub("", expected.stderr)


def test_nets_that_run_late(tmp_path: Path) -> None:
    """Nets that run in threads which are left, or in functions that are called at exit, are reported on."""
    (tmp_path / "late.py").write_text(LATE)
    done = run("--report", "out.json", "--fail-on-unused", "late.py", folder=tmp_path)
    assert (done.returncode, done.stdout) == (3, "thread\nexit\n"), done.stderr
    nets = json.loads((tmp_path / "out.json").read_text())["nets"]
    assert [(net["class"], net["summary"]["unused_layers"]) for net in nets] == [("Dense", 0), ("Two", 1)]


class TestTheFirstReport:
    """Its script, as it was written for MindSpore."""

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        """Where it is."""
        (tmp_path / "train.py").write_text(FIRST_REPORT)
        return tmp_path

    def test_eight_names_and_a_report(self, folder: Path) -> None:
        """The two layers are named with the lines at which they were assigned."""
        done = run("train.py", folder=folder)
        assert done.returncode == 0, done.stderr
        assert done.stdout.split() == EIGHT
        told = {line.split("  never called")[0]: line for line in done.stderr.splitlines() if "  never called" in line}
        assert [key.split(":")[0].strip(" !") for key in told] == ["(conv3_mutated)", "(relu2_mutated)"]
        for line, text in zip(told.values(), ("self.conv3_mutated", "self.relu2_mutated")):
            number = 1 + next(i for i, code in enumerate(FIRST_REPORT.splitlines()) if text in code)
            assert line.endswith(f"(train.py:{number})") or line.endswith(f"{os.sep}train.py:{number})")
        assert "7 of 9 layers used" in done.stderr and "36 B deferred" in done.stderr

    def test_fails_if_asked_to(self, folder: Path) -> None:
        """With 3, and the report is written to a file."""
        done = run("--fail-on-unused", "--report", "out.json", "train.py", folder=folder)
        assert done.returncode == 3 and done.stdout.split() == EIGHT
        (net,) = json.loads((folder / "out.json").read_text())["nets"]
        assert net["class"] == "Model" and net["times"] == 1
        unused = [layer["name"] for layer in net["layers"] if layer["reason"] == "never_called"]
        assert unused == ["conv3_mutated", "relu2_mutated"]

    def test_without_the_patch_there_are_ten(self, folder: Path) -> None:
        """So MindSpore does it."""
        assert len(python("train.py", folder=folder).stdout.split()) == 10


LATE = """
import atexit
from concurrent.futures import ThreadPoolExecutor
from mindspore import nn, ops

class Two(nn.Cell):
    def __init__(self):
        super().__init__()
        self.used, self.left = nn.Dense(2, 2), nn.Dense(2, 2)
    def construct(self, x):
        return self.used(x)

def use(net, text):
    net(ops.ones((1, 2)))
    print(text, flush=True)

pool, nets = ThreadPoolExecutor(1), [nn.Dense(2, 2), Two()]
pool.submit(use, nets[0], "thread")
atexit.register(use, nets[1], "exit")
"""

SEARCH = """
import mindspore as ms
from mindspore import nn, ops, Tensor

class Net(nn.Cell):
    def __init__(self, dead):
        super().__init__()
        self.fc = nn.Dense(2, 2)
        if dead:
            self.dead = nn.Dense(2, 2)
    def construct(self, x):
        return self.fc(x)

class Never(nn.Cell):
    def __init__(self):
        super().__init__()
        self.fc = nn.Dense(2, 2)

def trial(dead):
    net = Net(dead)
    step = nn.TrainOneStepCell(nn.WithLossCell(net, nn.MSELoss()), nn.Momentum(net.trainable_params(), 0.1, 0.9))
    step(ops.ones((1, 2)), ops.ones((1, 2)))

import warnings
warnings.simplefilter("ignore")
for number in range(6):
    trial(number % 3 == 0)
never = Never()
kept = Net(False)
kept(ops.ones((1, 2)))
"""


def test_nets_that_are_gone(tmp_path: Path) -> None:
    """They are reported on as well, those that are alike once; so is one that is never called."""
    (tmp_path / "search.py").write_text(SEARCH)
    done = run("--report", "out.json", "--fail-on-unused", "search.py", folder=tmp_path)
    assert done.returncode == 3, done.stderr
    nets = json.loads((tmp_path / "out.json").read_text())["nets"]
    told = [(net["class"], net["times"], net["summary"]["unused_layers"], net["summary"]["num_steps"]) for net in nets]
    assert sorted(told) == [("Net", 2, 1, 0), ("Net", 5, 0, 0), ("Never", 1, 1, 0)]


def test_what_cant_be_run(tmp_path: Path) -> None:
    """One line, and exit code 2."""
    for arguments, text in (
        (["missing.py"], "can't open 'missing.py'"),
        (["-m", "missing"], "nothing in 'missing' that can be run"),
        (["-m", "missing.inner"], "can't find 'missing.inner'"),
        (["--report", "out.pdf", "x.py"], "ends with .txt, .json, .html"),
        (["--report", "no/where.txt", "x.py"], "there is no folder"),
        ([], "required: SCRIPT"),
        (["-m"], "required: MODULE"),
        (["--rep", "out.txt", "x.py"], "unrecognized arguments: --rep"),
    ):
        done = run(*arguments, folder=tmp_path)
        assert done.returncode == 2 and text in done.stderr and "Traceback" not in done.stderr, arguments
        assert done.stdout == ""


KINDS = """
import mindspore as ms
from mindspore import nn, ops

class Net(nn.Cell):
    def __init__(self, width, dead=False):
        super().__init__()
        self.fc = nn.Dense(2, width)
        if dead:
            self.dead = nn.Dense(2, 2)
    def construct(self, x):
        return self.fc(x)

import warnings
warnings.simplefilter("ignore")
for width in range(1, 56):
    Net(width, dead=width == 55)(ops.ones((1, 2)))
kept = Net(100)
grad_fn = ms.value_and_grad(lambda x: kept(x).sum(), None, kept.trainable_params())
grad_fn(ops.ones((1, 2)))
"""


def test_nets_of_many_kinds(tmp_path: Path) -> None:
    """Those that are there in the end are kept; how many others aren't is said, and what they left unused counts."""
    (tmp_path / "kinds.py").write_text(KINDS)
    done = run("--report", "out.JSON", "--fail-on-unused", "kinds.py", folder=tmp_path)
    assert done.returncode == 3, done.stderr
    told = json.loads((tmp_path / "out.JSON").read_text())
    widths = [net["layers"][1]["num_parameters"] // 3 for net in told["nets"]]
    assert (widths, told["left_out"]) == ([*range(1, 51), 100], 5)


ALL_STEPS = """
import mindspore as ms
from mindspore import nn, ops

class Net(nn.Cell):
    def __init__(self):
        super().__init__()
        self.cut, self.fc, self.late = nn.Dense(2, 2), nn.Dense(2, 2), nn.Dense(2, 2)
    def construct(self, x, late):
        x = self.fc(x) + ops.stop_gradient(self.cut(x))
        return self.late(x) if late else x

net = Net()
grad_fn = ms.value_and_grad(lambda x, late: net(x, late).sum(), None, net.trainable_params())
for step in range(5):
    grad_fn(ops.ones((1, 2)), step == 3)
"""


def test_all_steps_are_watched(tmp_path: Path) -> None:
    """Also without an optimizer that wants to know."""
    (tmp_path / "steps.py").write_text(ALL_STEPS)
    done = run("--fail-on-unused", "steps.py", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "no gradient arrived at it (5 computations) (steps.py:8)" in done.stderr
    assert "reached in 1 of 5 steps: step 4 (steps.py:8)" in done.stderr


FILTER = """
import sys, warnings
from mindspore import nn, ops
warnings.simplefilter("error")

class Net(nn.Cell):
    def __init__(self):
        super().__init__()
        self.fc, self.dead = nn.Dense(2, 2), nn.Dense(2, 2)
    def construct(self, x):
        return self.fc(x)

print(Net()(ops.zeros((1, 2))).shape)
try:
    warnings.warn("its own")
except UserWarning:
    print("raised")
"""


def test_warnings_that_are_made_errors(tmp_path: Path) -> None:
    """The program's filters make none of lazycell's, which it doesn't know of."""
    (tmp_path / "script.py").write_text(FILTER)
    done = run("script.py", folder=tmp_path)
    assert (done.returncode, done.stdout) == (0, "(1, 2)\nraised\n"), done.stderr
    assert "script.py:13: UnusedLayerWarning: 1 layer of Net" in done.stderr


UNUSED_THEN = """
import atexit, os, sys
from mindspore import nn, ops

class Net(nn.Cell):
    def __init__(self):
        super().__init__()
        self.fc, self.dead = nn.Dense(2, 2), nn.Dense(2, 2)
    def construct(self, x):
        return self.fc(x)

net = Net()
net(ops.ones((1, 2)))
print("buffered")
"""


@pytest.mark.parametrize("end, code", [
    ("", 3), ("sys.exit()", 3), ("sys.exit(0)", 3), ("sys.exit(4)", 4), ("sys.exit('no')", 1), ("1 / 0", 1),
    ("os.mkdir('x'); os.chdir('x')", 3), ("sys.stderr.close()", 3), ("sys.stdout.close()", 3),
    ("atexit.register(print, 'last')", 3), ("os.fork() and os.wait(); sys.exit()", 3),
    ("del net; net = Net()", 3), ("net.dead = None; net = Net()", 0),
])  # fmt: skip
def test_fails_if_all_else_went_well(end: str, code: int, tmp_path: Path) -> None:
    """With 3 only if the program has ended well; its output is complete, the report where it was to be."""
    (tmp_path / "script.py").write_text(f"{UNUSED_THEN}{end}\n")
    done = run("--fail-on-unused", "--report", "out.txt", "script.py", folder=tmp_path)
    assert done.returncode == code, done.stderr
    assert done.stdout.startswith("buffered\n") or "stdout.close" in end
    assert done.stdout.endswith("last\n") == ("last" in end)
    assert "layers used" in (tmp_path / "out.txt").read_text()


@pytest.mark.parametrize("where", ["2>/dev/full", "2>&-", "2>/dev/null", "2> >(true)"])
def test_standard_error_that_takes_nothing(where: str, tmp_path: Path) -> None:
    """It changes nothing."""
    (tmp_path / "script.py").write_text(UNUSED_THEN)
    for options, code in (("", 0), ("--fail-on-unused", 3)):
        done = shell(f"set -o pipefail; {{python}} -m lazycell run {options} script.py {where}", folder=tmp_path)
        assert done.returncode == code


def shell(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command of the shell, with this Python and this lazycell."""
    env = {**os.environ, "PYTHONPATH": str(Path(lazycell.__file__).parents[1]), "GLOG_v": "4"}
    full = ["bash", "-c", command.format(python=sys.executable)]
    return subprocess.run(full, cwd=folder, env=env, capture_output=True, text=True, timeout=300)


@pytest.mark.skipif(not hasattr(signal, "SIGPIPE"), reason="needs a shell's pipe")
def test_a_reader_that_has_seen_enough(tmp_path: Path) -> None:
    """The report goes to standard error, which is read; the rest is as without."""
    (tmp_path / "script.py").write_text("print('x\\n' * 100000)")
    expected, done = (
        shell(f"{{python}} {how} script.py | head -1; exit ${{{{PIPESTATUS[0]}}}}", folder=tmp_path)
        for how in ("", "-m lazycell run")
    )
    assert (done.returncode, done.stdout) == (expected.returncode, expected.stdout) and done.returncode
    assert done.stderr.replace(NO_NET, "") == expected.stderr
