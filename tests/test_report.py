"""Reports: text, JSON, and the errors of asking for them. The page is tested in test_html.py."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from helpers import ones
from mindspore import nn
from test_rows import Net, train

import lazycell
from lazycell import _report
from lazycell._rows import net_report

pytestmark = pytest.mark.filterwarnings("ignore::lazycell.UnusedLayerWarning")
GOLDEN = Path(__file__).parent / "golden"


def trained() -> nn.Cell:
    """A net with a layer for each reason."""
    net = Net()
    lazycell.freeze(net.stem)
    optimizer = lazycell.LazyOptimizer(nn.Adam, [p for p in net.get_parameters() if "alone" not in p.name])
    train(net, optimizer.parameters, [False, True, False], optimizer)
    return net


@pytest.mark.parametrize("format", ["text", "json"])
def test_golden_files(format: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The report of a net with a layer for each reason; ``--update-golden`` writes it anew."""
    monkeypatch.chdir(Path(__file__).parent)  # places are told relative to it, except in JSON
    told = lazycell.report(trained(), format)
    told = told.replace("test_rows.py" if format == "text" else str(Path.cwd() / "test_rows.py"), "net.py")
    if format == "json":
        told = json.dumps({**json.loads(told), "versions": {}}, indent=1)
    file = GOLDEN / f"report.{format}"
    if request.config.getoption("--update-golden"):
        file.write_text(told + "\n", encoding="utf-8")
    assert told + "\n" == file.read_text(encoding="utf-8")


def test_json_is_what_the_readme_documents() -> None:
    """Its schema has a name; every entry is there."""
    told = json.loads(lazycell.report(trained(), format="json"))
    assert told["schema"] == "lazycell.report/1" and set(told) == {"schema", "versions", "nets", "left_out"}
    (net,) = told["nets"]
    assert set(net) == {"class", "times", "summary", "layers"}
    assert net["class"] == "Net" and net["summary"]["unused_layers"] == 4
    layer = next(layer for layer in net["layers"] if layer["name"] == "branch")
    assert (layer["reason"], layer["used"], layer["state"]) == ("some_steps", True, "touched")


def test_html_is_a_page() -> None:
    """With the net's name and its layers."""
    told = lazycell.report(trained(), "html")
    assert told.startswith("<!DOCTYPE html>") and "branch" in told and "Net" in told


def test_several_nets() -> None:
    """Each has its tree; nets that are alike are said once."""
    net = net_report(trained())
    told = _report.render([net, replace(net, times=7)], "text")
    assert told.count("layers used") == 2 and told.count("7 nets like this") == 1


@pytest.mark.parametrize("format", ["text", "json", "html"])
def test_nets_that_are_left_out(format: str) -> None:
    """Each format says how many."""
    net = net_report(trained())
    for left_out, words in ((0, ""), (1, "1 more net of another kind is left out"), (1200, "1,200 more nets of other")):
        told = _report.render([net], format, left_out)
        if format == "json":
            assert json.loads(told)["left_out"] == left_out
        else:
            assert ("left out" in told) == bool(left_out) and words in told


def test_places_are_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are relative to the current folder for people, and complete for programs."""
    monkeypatch.chdir(Path(__file__).parent)
    net = trained()
    assert "(test_rows.py:" in lazycell.report(net) and "</span>test_rows.py:" in lazycell.report(net, "html")
    monkeypatch.chdir("..")
    assert f"(tests{os.sep}test_rows.py:" in lazycell.report(net)
    (told,) = json.loads(lazycell.report(net, "json"))["nets"]
    places = [layer["where"] for layer in told["layers"] if layer["where"]]
    assert places and all(place.startswith(str(Path(__file__).parent)) for place in places)


def test_names_that_differ_at_the_end() -> None:
    """They still differ when they are cut."""

    class Wide(lazycell.LazyCell):
        def __init__(self) -> None:
            super().__init__()
            for number in range(3):
                setattr(self, f"a_layer_{'with_a_long_name_' * 4}{number}", nn.Dense(2, 2))

    labels = [line.split("  deferred")[0] for line in lazycell.report(Wide()).splitlines() if "Dense" in line]
    assert len(set(labels)) == 3 and all(": Dense" in label for label in labels)


@pytest.mark.parametrize("flags, words", [
    ([], "no gradient computation was seen"),
    ([True], "1 gradient computation"),
    ([True] * 3, "3 gradient computations"),
])  # fmt: skip
def test_steps_are_told(flags: list[bool], words: str) -> None:
    """How many there were."""
    net = Net()
    train(net, net.trainable_params(), flags)
    assert lazycell.report(net).splitlines()[-1] == words


def test_long_names_keep_columns() -> None:
    """They are cut, and the columns stand."""

    class Deep(lazycell.LazyCell):
        def __init__(self, depth: int) -> None:
            super().__init__()
            if depth:
                setattr(self, "a_layer_with_a_name_that_is_too_long", Deep(depth - 1))
            else:
                self.fc = nn.Dense(2, 2)

    lines = lazycell.report(Deep(6)).splitlines()
    assert len({line.index("deferred") for line in lines if " deferred  " in line and "allocated" not in line}) == 1


def test_mistakes() -> None:
    """Each says what is wrong."""
    with pytest.raises(ValueError, match="'text', 'json', 'html', but got 'pdf'"):
        lazycell.report(Net(), format="pdf")
    with pytest.raises(TypeError, match="expected a mindspore.nn.Cell"):
        lazycell.report(3)
    with pytest.raises(lazycell.LazyCellError, match="isn't tracked"):
        lazycell.report(nn.Dense(2, 2))


def test_nothing_is_allocated() -> None:
    """Asking for a report leaves deferred what is deferred."""
    net = Net()
    net(ones(1, 4), False)
    before = lazycell.registry(net).allocated_nbytes
    for format in ("text", "json", "html"):
        lazycell.report(net, format)
    assert lazycell.registry(net).allocated_nbytes == before
