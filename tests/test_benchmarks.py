"""Benchmarks: what they compare is the same work, and what is published is what was measured."""

from __future__ import annotations

import json
from pathlib import Path

import mindspore as ms
import pytest
from mindspore import nn

import lazycell
from benchmarks import _measure, _results, freezing, scale, settled, training
from benchmarks.__main__ import NAMES

pytestmark = pytest.mark.filterwarnings("ignore::lazycell.UnusedLayerWarning")


def test_tables_are_those_that_were_measured() -> None:
    """README's tables and plots are written by ``python -m benchmarks``, never by hand."""
    text = _results.README.read_text(encoding="utf-8")
    found = list(_results.RESULTS.glob("*.json"))
    assert found and {path.stem for path in found} <= set(NAMES)
    for path in found:
        data = json.loads(path.read_text(encoding="utf-8"))
        assert _results.markdown(path.stem, data) in text
        assert all((_results.PLOTS / f"{path.stem}-{i + 1}.svg").exists() for i in range(len(data["plots"])))


def test_results_are_published_at_their_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A benchmark's tables replace those of its last run, and nothing else; one without a place is an error."""
    readme = tmp_path / "README.md"
    readme.write_text("before\n<!-- results: one -->\nold\n<!-- end: one -->\nafter\n")
    for name, path in {"README": readme, "RESULTS": tmp_path / "results", "PLOTS": tmp_path / "plots"}.items():
        monkeypatch.setattr(_results, name, path)
    results = _results.Results()
    results.table("A title.", "what", "ratio").add("this", "1.0")
    _results.save("one", results)
    _results.publish()
    text = readme.read_text()
    assert text.startswith("before\n<!-- results: one -->\nA title.") and text.endswith("<!-- end: one -->\nafter\n")
    assert "| this | 1.0 |" in text and "old" not in text and f"MindSpore {ms.__version__}".lower() in text.lower()
    _results.save("two", results)
    with pytest.raises(ValueError, match="no place for two"):
        _results.publish()


def test_rivals_take_turns() -> None:
    """Each comes once in each round, and the order changes."""
    calls: list[str] = []
    times = _measure.interleaved({name: lambda name=name: calls.append(name) or 1.0 for name in "abc"}, 20)
    rounds = [calls[i : i + 3] for i in range(0, 60, 3)]
    assert all(sorted(turn) == ["a", "b", "c"] for turn in rounds) and len(set(map(tuple, rounds))) > 1
    assert times == {name: [1.0] * 20 for name in "abc"}


@pytest.mark.parametrize("mode", training.MODES)
def test_training_rivals_give_the_same_weights(mode: str) -> None:
    """LazyCell, hand-pruned and eager: three steps, the same bits, and eager alone keeps moments for dead layers."""
    ms.set_context(mode=training.MODES[mode])
    made = {rival: training.training(rival, 2, 8) for rival in training.RIVALS}
    training.agree(made)
    held = {rival: training.optimizer_bytes(optimizer) for rival, (_, optimizer) in made.items()}
    assert held["LazyCell"] == held["hand-pruned"] == held["eager"] / 3


@pytest.mark.parametrize("net", freezing.NETS)
def test_freezing_rivals_give_the_same_gradients(net: str) -> None:
    """MindSpore as it is, lazycell and the limit."""
    freezing.agree(freezing.steps(net, 2), freezing.images(net))


def test_scale_and_settled_nets_run() -> None:
    """All that is measured of them can be measured."""
    assert all(seconds > 0 for seconds in scale.once(3).values())
    assert lazycell.registry(settled.build(lazycell.LazyCell, 2, 1)).untouched == ("dead", "dead.0")
    settled.build(nn.Cell, 2, 1)
