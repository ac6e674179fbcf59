"""Versions of MindSpore."""

from __future__ import annotations

import re
from pathlib import Path

import mindspore
import pytest
from mindspore import nn

import lazycell
from lazycell import _mindspore


class Net(lazycell.LazyCell):
    """Any net."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Dense(2, 2)


@pytest.mark.parametrize("use", [Net, lambda: lazycell.track(nn.Dense(2, 2))])
def test_a_version_that_lacks_something(use, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the first use, one error says what is missing and which versions were tested."""
    monkeypatch.setattr(_mindspore._versions, "_checked", [])
    monkeypatch.setattr(_mindspore._versions, "_NEEDED", ((nn.Cell, ("_self_check", "_renamed_in_3_0")),))
    monkeypatch.setattr(mindspore, "__version__", "3.0.0")
    message = r"MindSpore 3\.0\.0 lacks _renamed_in_3_0, .*tested on MindSpore 2\.7\.1, 2\.8\.0, 2\.9\.0 and 2\.10\.0"
    for _ in range(2):
        with pytest.raises(lazycell.LazyCellError, match=message):
            use()


def test_a_newer_version_that_has_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """It works."""
    monkeypatch.setattr(_mindspore._versions, "_checked", [])
    monkeypatch.setattr(mindspore, "__version__", "3.0.0")
    assert len(Net().trainable_params()) == 0


def test_versions_are_the_same_everywhere() -> None:
    """The error, the scripts and the README name the same versions."""
    versions = re.findall(r"[\d.]+\d", _mindspore.TESTED)
    root = Path(lazycell.__file__).parent.parent
    if not (root / ".ci" / "matrix").exists():
        pytest.skip("the scripts aren't installed with the package")
    assert re.search(r"^MINDSPORE=\((.*)\)", (root / ".ci" / "matrix").read_text(), re.M)[1].split() == versions
    run = (root / ".ci" / "run").read_text()
    assert (re.search(r"OLDEST=(.*)", run)[1], re.search(r"NEWEST=(.*)", run)[1]) == (versions[0], versions[-1])
    assert ", ".join(versions) in (root / "README.md").read_text()
