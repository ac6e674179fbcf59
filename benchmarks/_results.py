"""Keep what was measured as JSON; write README's tables from it, and draw it."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks import _measure

HERE = Path(__file__).parent
RESULTS, PLOTS, README = HERE / "results", HERE / "plots", HERE / "README.md"


@dataclass
class Table:
    """Rows of text under one title."""

    title: str
    columns: Sequence[str]
    rows: list[Sequence[str]] = field(default_factory=list)

    def add(self, *row: str) -> None:
        """Add a row, and show it at once."""
        self.rows.append(row)
        print(f"| {' | '.join(row)} |", flush=True)

    def start(self) -> Table:
        """Show title and head."""
        print(f"\n{self.title}\n\n{_head(self.columns)}", flush=True)
        return self


@dataclass
class Plot:
    """Lines over numbers, or over names, at equal steps."""

    title: str
    x_label: str
    y_label: str
    x: Sequence[float | str]
    lines: dict[str, Sequence[float]] = field(default_factory=dict)
    logarithmic: bool = False


@dataclass
class Results:
    """All that one benchmark gives."""

    tables: list[Table] = field(default_factory=list)
    plots: list[Plot] = field(default_factory=list)

    def table(self, title: str, *columns: str) -> Table:
        """Begin a table."""
        self.tables.append(Table(title, columns))
        return self.tables[-1].start()


def save(name: str, results: Results) -> None:
    """Keep a benchmark's results, with where they were measured and by which command."""
    RESULTS.mkdir(exist_ok=True)
    head = {"command": f"python -m benchmarks {name}", "environment": _measure.environment()}
    (RESULTS / f"{name}.json").write_text(json.dumps(head | asdict(results), indent=1) + "\n")


def publish() -> None:
    """Write the tables into the README, between the marks that bear the benchmarks' names, and draw the plots."""
    text = README.read_text()
    for path in sorted(RESULTS.glob("*.json")):
        data, name = json.loads(path.read_text()), path.stem
        begin, end = f"<!-- results: {name} -->", f"<!-- end: {name} -->"
        body = f"{begin}\n{markdown(name, data)}\n{end}"
        text, count = re.subn(f"{re.escape(begin)}.*?{re.escape(end)}", lambda _: body, text, flags=re.S)  # noqa: B023
        if not count:
            raise ValueError(f"{README.name} has no place for {name}: add the lines {begin} and {end}")
        for index, plot in enumerate(data["plots"]):
            _draw(Plot(**plot), PLOTS / f"{name}-{index + 1}.svg")
    README.write_text(text)


def markdown(name: str, data: dict) -> str:
    """A benchmark's tables and plots, as the README shows them."""
    caption = f"`{data['command']}`; {data['environment']}."
    parts = []
    for table in data["tables"]:
        rows = "\n".join(f"| {' | '.join(row)} |" for row in table["rows"])
        parts.append(f"{table['title']}\n\n{_head(table['columns'])}\n{rows}\n\n{caption}")
    for index, plot in enumerate(data["plots"]):
        parts.append(f"![{plot['title']}](plots/{name}-{index + 1}.svg)")
    return "\n\n".join(parts)


def _head(columns: Sequence[str]) -> str:
    return f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|"


def _draw(plot: Plot, path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = path.name  # the same figures give the same file
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4), layout="constrained")
    places = range(len(plot.x))
    for index, (label, values) in enumerate(plot.lines.items()):
        axes.plot(places, values, label=label, marker="osD^vP*X"[index % 8], markersize=5, linewidth=1.5)
    axes.set_xticks(places, [str(x) for x in plot.x])
    axes.set(title=plot.title, xlabel=plot.x_label, ylabel=plot.y_label)
    if plot.logarithmic:
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper", fontsize="small")
    PLOTS.mkdir(exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
