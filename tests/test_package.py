"""The package as a whole: names, imports, documentation."""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import lazycell
from lazycell import _cli, _demo

PACKAGE = Path(lazycell.__file__).parent
ORDER = (
    "_errors", "_mindspore", "_deferral", "_unsized", "_ranks", "_touching", "_history", "_reading", "_tracking",
    "_construction", "_sizing", "_listed", "_layers", "_registry", "_live", "_together", "_cell", "_dry_run",
    "_sized_graphs", "layers", "_freezing", "_aligned", "_gradient", "_groups", "_states", "_optimizer",
    "_standing_in", "_patch", "_rows", "_html", "_report", "_run", "_demo", "_progress", "_cli", "distributed",
    "__main__",
)  # fmt: skip
INTERNALS = (
    "_versions", "_construction", "_optimizers", "_running", "_graphs", "_draws", "_storage", "_meta", "_recording",
    "_cells", "_communication",
)  # fmt: skip


def test_public_names() -> None:
    """What is public, and nothing else is."""
    assert lazycell.__all__ == [
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
    for name in lazycell.__all__:
        public = getattr(lazycell, name)
        assert inspect.getdoc(public), name
        if inspect.isclass(public) and public is not lazycell.LazyCell:  # MindSpore reads its source by its module
            assert public.__module__ == "lazycell"
    assert issubclass(lazycell.UntouchedError, lazycell.LazyCellError)
    assert issubclass(lazycell.LazyCellError, RuntimeError)


def _imports(path: Path, package: str) -> set[str]:
    """The modules of a package that a file imports."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    type_checking = [n for n in ast.walk(tree) if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.dump(n.test)]
    skipped = {id(child) for node in type_checking for child in ast.walk(node)}
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and id(node) not in skipped:
            if node.module == package:
                found.update(alias.name for alias in node.names)
            elif (node.module or "").startswith(package + "."):
                found.add(node.module[len(package) + 1 :].split(".")[0])
    return found & {*ORDER, *INTERNALS}


def test_imports_go_one_way() -> None:
    """From later layers to earlier ones; every module has its place."""
    inner = PACKAGE / "_mindspore"
    assert {path.stem for path in PACKAGE.glob("*.py")} == {*ORDER, "__init__"} - {"_mindspore"}
    assert {path.stem for path in inner.glob("*.py")} == {*INTERNALS, "__init__"}
    for position, module in enumerate(ORDER):
        if module != "_mindspore":
            assert _imports(PACKAGE / f"{module}.py", "lazycell") <= set(ORDER[:position]), module
    for position, module in enumerate(INTERNALS):
        assert _imports(inner / f"{module}.py", "lazycell._mindspore") <= set(INTERNALS[:position]), module
        assert _imports(inner / f"{module}.py", "lazycell") <= {"_errors", "_mindspore"}, module


def test_only_one_package_knows_internals() -> None:
    """Outside `_mindspore`, the only private names of others are a cell's two mappings and the interpreter's frames."""
    trees = {path.stem: ast.parse(path.read_text(encoding="utf-8")) for path in PACKAGE.glob("*.py")}
    nodes = [node for tree in trees.values() for node in ast.walk(tree)]
    own = {n.name for n in nodes if isinstance(n, (ast.FunctionDef, ast.ClassDef))} | {path for path in trees}
    own |= {n.id for n in nodes if isinstance(n, ast.Name)}
    own |= {n.attr for n in nodes if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)}
    for stem, tree in trees.items():
        used = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and re.match("_[^_]", n.attr)}
        assert used - own <= {"_params", "_cells", "_getframe"}, stem


def test_importing_changes_nothing() -> None:
    """Not an attribute of MindSpore differs after the import."""
    script = """
import mindspore as ms
from mindspore import nn, ops
from mindspore.common import initializer
import mindspore.ops.primitive as primitive
owners = [ms, nn, ops, nn.Cell, nn.Optimizer, ms.Parameter, ms.Tensor, initializer, primitive]
state = lambda: [{name: id(value) for name, value in vars(owner).items()} for owner in owners]
before = state()
import lazycell
assert state() == before
print("same")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("same\n")


@pytest.mark.filterwarnings("ignore::lazycell.UnusedLayerWarning")
@pytest.mark.parametrize("module", [name for name in ORDER if name not in ("_cli", "__main__")])
def test_examples_in_docstrings_run(module: str) -> None:
    """Every ``>>>`` example gives what it says."""
    assert doctest.testmod(importlib.import_module(f"lazycell.{module}")).failed == 0


def test_examples_in_the_readme_run(tmp_path: Path) -> None:
    """The README's Python blocks run, one after the other, and print what their comments say."""
    readme = PACKAGE.parent / "README.md"
    if not readme.exists():
        pytest.skip("the README isn't installed with the package")
    blocks = re.findall(r"```python\n(.*?)```", readme.read_text(encoding="utf-8"), re.DOTALL)
    script = tmp_path / "readme.py"  # in a file: Graph mode reads sources
    script.write_text("\n".join(blocks), encoding="utf-8")
    path = {"PYTHONPATH": os.pathsep.join([str(PACKAGE.parent), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=300, cwd=tmp_path, env=os.environ | path
    )
    assert blocks and done.returncode == 0, done.stderr
    head = "['head.weight', 'head.bias']"
    printed = (
        "['body.weight', 'body.bias', 'head.weight', 'head.bias']", head, "('1',)", "2",
        "LazyConv2d(in_channels=?, out_channels=8, kernel_size=3, stride=2)", "(10, 2048) True", "True (16,)",
    )  # fmt: skip
    for line in printed:
        assert line in done.stdout.splitlines()
    assert "aux (Dense): 69,632 parameters, 272 KB" in done.stderr


class TestCommandLine:
    """``python -m lazycell``."""

    def run(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run it in a process of its own."""
        return subprocess.run(
            [sys.executable, "-m", "lazycell", *arguments],
            capture_output=True,
            text=True,
            env={**os.environ, **environment},
            timeout=300,
        )

    def test_demo(self) -> None:
        """Ten against eight names, the warning, bytes and the table, within 80 columns, in a pipe."""
        done = self.run("demo", GLOG_v="4")
        assert done.returncode == 0, done.stderr
        out = done.stdout
        assert "nn.Cell : 10 gradients" in out and "LazyCell: 8 gradients" in out
        assert "The gradients of the 8 are bit-identical." in out
        assert "conv3_mutated (Conv2dTranspose): 9 parameters, 36 B" in out
        assert "7 of 9 layers used" in out and "(596,754,072 bytes)" in out and "(596,754,036 bytes)" in out
        assert max(map(len, out.splitlines())) <= 80
        assert out.isascii() and "\x1b" not in out

    def test_a_reader_that_has_seen_enough(self) -> None:
        """A closed pipe is no error."""
        command = f"{sys.executable} -m lazycell demo | head -1"
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=300)
        assert done.stdout.count("\n") == 1 and "BrokenPipe" not in done.stderr

    def test_a_wrong_command(self) -> None:
        """One line says which there are, and the exit code is 2."""
        done = self.run("dmeo")
        assert done.returncode == 2 and "demo" in done.stderr and "Traceback" not in done.stderr

    def test_a_difference_is_an_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """If the gradients differed, the demo would say so and exit with 1."""
        monkeypatch.setattr(_demo, "_identical", lambda eager, lazy: False)
        monkeypatch.setattr(_demo, "gradient_step", lambda base: _demo.Step(["a"], (), 1, []))
        written: list[str] = []
        assert _demo.demo(written.append) == 1
        assert any("NOT bit-identical" in text for text in written)
        assert _cli.main is not None
