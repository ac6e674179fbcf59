"""A report as one HTML page: a collapsible tree of layers that needs no network, and no script to be read."""

from __future__ import annotations

import os
from base64 import b64encode
from collections import Counter
from collections.abc import Iterator, Sequence
from hashlib import sha256
from html import escape

from lazycell._registry import format_bytes
from lazycell._rows import LayerRow, NetReport, Reason, Summary, left_out_in_words

# Browsers nest elements at most 512 deep, and some lay out fewer; a level of the tree takes three. Deeper layers
# stand flat below the last one that nests.
_DEEPEST = 50
_INDENTED = 10  # levels that are indented, for the style sheet; deeper ones say how deep they are
_HANDY = 100  # rows of one net that are open to begin with
_SHORT = 20  # layers that need a look that are listed without being asked for

_BADGES = {
    Reason.NEVER_CALLED: "never called",
    Reason.FROZEN: "frozen",
    Reason.CUT_OFF: "cut off from the loss",
    Reason.NOT_IN_OPTIMIZER: "not in the optimizer",
    Reason.SOME_STEPS: "some steps",
}
_SUSPECT = (Reason.CUT_OFF, Reason.NOT_IN_OPTIMIZER)  # layers that were used, and don't learn although they might
_STEPS = {0: "no gradient computation was seen", 1: "gradient computation"}
_MORE_STEPS = "gradient computations"


def page(nets: Sequence[NetReport], left_out: int = 0, title: str = "lazycell report") -> str:
    """A complete HTML document, the same for the same nets; nothing in it is loaded from elsewhere.

    Args:
        nets: What to show, one after the other.
        left_out: How many there were besides.
        title: The document's title and first heading.
    """
    # Should anything ever slip through unescaped, this page's own script is still the only one that may run.
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{_digest(_SCRIPT)}'; base-uri 'none'"
    body = "\n".join(_net(net, number) for number, net in enumerate(nets, 1)) or "<p>No net was seen.</p>"
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escape(title)}</title>
<style>{_STYLE}</style>
</head>
<body>
<header><h1>{escape(title)}</h1>{_contents(nets)}{_left_out(left_out)}</header>
{_TOOLS}
<main>
{body}
</main>
<script>{_SCRIPT}</script>
</body>
</html>
"""


def _digest(script: str) -> str:
    return b64encode(sha256(script.encode()).digest()).decode()


def _contents(nets: Sequence[NetReport]) -> str:
    """Links to the nets, if there are several."""
    if len(nets) < 2:
        return ""
    links = "".join(f'<li><a href="#n{number}">{escape(net.cls_name)}</a></li>' for number, net in enumerate(nets, 1))
    return f'<nav aria-label="Nets"><ol>{links}</ol></nav>'


def _left_out(number: int) -> str:
    return f'<p class="left-out">{left_out_in_words(number)}.</p>' if number else ""


def _net(net: NetReport, number: int) -> str:
    """The section of one net; ids are made of numbers, never of names."""
    times = f' <span class="times">{net.times:,} nets like this</span>' if net.times > 1 else ""
    return f"""<section id="n{number}" aria-labelledby="n{number}-name">
<h2 id="n{number}-name">{escape(net.cls_name)}{times}</h2>
<div class="overview">
{_sums(net.summary)}
{_suspects(net.layers, number)}
</div>
<h3>All layers</h3>
{_LEGEND}
{"".join(_tree(net.layers, number))}
</section>"""


def _sums(s: Summary) -> str:
    """The summary, as terms with a figure and a few words each."""
    sums = [
        ("Layers", f"{s.num_layers:,}", f"{s.used_layers:,} used, {s.unused_layers:,} unused"),
        ("Parameters", f"{s.num_parameters:,}", f"{s.touched_parameters:,} touched"),
        (
            "Bytes",
            format_bytes(s.nbytes),
            f"{format_bytes(s.allocated_nbytes)} allocated, {format_bytes(s.deferred_nbytes)} deferred",
        ),
        ("Gradients spared", format_bytes(s.gradient_nbytes), "would have gone to untouched parameters"),
        ("Moments spared", format_bytes(s.moment_nbytes), "for two of each such gradient, as Adam’s"),
        ("Steps", f"{s.num_steps:,}", _STEPS.get(s.num_steps, _MORE_STEPS)),
    ]
    groups = (f'<div><dt>{term}</dt><dd class="figure">{n}</dd><dd>{words}</dd></div>' for term, n, words in sums)
    return f'<dl class="sums">{"".join(groups)}</dl>'


def _outside(layers: Sequence[LayerRow]) -> Iterator[tuple[int, LayerRow]]:
    """The rows that no unused layer stands above, with their positions."""
    closed: int | None = None
    for position, row in enumerate(layers):
        if closed is None or row.depth <= closed:
            closed = row.depth if row.depth and not row.used else None
            yield position, row


def _worth_a_look(layers: Sequence[LayerRow]) -> list[tuple[int, LayerRow]]:
    """The unused layers that stand for all below them, then those that don't learn, then those unused by design."""
    found = [(position, row) for position, row in _outside(layers) if row.depth and (not row.used or _is_suspect(row))]
    return sorted(found, key=lambda pair: (pair[1].optional, pair[1].used))


def _is_suspect(row: LayerRow) -> bool:
    return row.reason in _SUSPECT


def _suspects(layers: Sequence[LayerRow], number: int) -> str:
    """Links to the layers that need a look."""
    found = _worth_a_look(layers)
    if not layers[0].used:
        return "<h3>Layers that need a look</h3><p>The net was built, but never run.</p>"
    if not found:
        return "<h3>Layers that need a look</h3><p>None: every layer was used.</p>"
    items = (
        f'<li{_marks(row)}><div class="row">{_row(row, layers[0].total_nbytes, f"#n{number}-{position}")}</div></li>'
        for position, row in found
    )
    unused = sum(not row.used for _, row in found)
    counts = {"topmost unused": unused, "not learning": len(found) - unused}
    told = ", ".join(f"{count:,} {words}" for words, count in counts.items() if count)
    return (
        f'<details class="suspects"{" open" if len(found) <= _SHORT else ""}><summary><h3>Layers that need a look '
        f'<span class="times">{told}</span></h3></summary>'
        f'<ul role="list">{"".join(items)}</ul></details>'
    )


def _marks(row: LayerRow) -> str:
    """The classes of a layer's item."""
    if row.used:
        return ' class="suspect"' if _is_suspect(row) else ""
    return ' class="unused optional"' if row.optional else ' class="unused"'


def _open_depth(layers: Sequence[LayerRow]) -> int:
    """How deep used containers are open, so that what is seen at first stays short; the net itself always is."""
    counts = Counter(row.depth for _, row in _outside(layers))
    seen, depth = counts[0] + counts[1], 1
    while counts[depth + 1] and (seen := seen + counts[depth + 1]) <= _HANDY:
        depth += 1
    return depth


def _tree(layers: Sequence[LayerRow], number: int) -> Iterator[str]:
    """Nested lists, written without recursion: each row closes as many as end with it."""
    open_depth, linked = _open_depth(layers), {position for position, _ in _worth_a_look(layers)}
    total = layers[0].total_nbytes
    depths = [min(row.depth, _DEEPEST) for row in layers]
    yield f'<ul class="tree" role="list" aria-label="Layers of {escape(layers[0].cls_name)}">'
    for position, (row, depth, following) in enumerate(zip(layers, depths, [*depths[1:], 0])):
        focus = ' tabindex="-1"' if position in linked else ""  # so that following a link moves the focus, too
        yield f'\n<li id="n{number}-{position}" data-depth="{row.depth}"{_marks(row)}{focus}>'
        if following > depth:
            shown = " open" if not row.depth or row.used and row.depth < open_depth else ""
            yield f'<details{shown}><summary class="row">{_row(row, total)}</summary><ul role="list">'
        else:
            yield f'<div class="row">{_row(row, total)}</div></li>{"</ul></details></li>" * (depth - following)}'
    yield "\n</ul>"


def _row(row: LayerRow, total: int, link: str = "") -> str:
    """What is said of one layer; ``.u`` are the words that a column's heading says to those who see it."""
    cells = [
        f'<span class="name">{_name(row, link)} {_tag(row)}</span>',
        f'<span class="where"><span class="u">assigned at </span>{_place(row.where)}</span>' if row.where else "",
        f'<span class="state" data-state="{escape(row.state)}">{escape(row.state)}</span>',
        *(_figures(row, total) if row.total_parameters else [f'<span class="count none">{_none(row)}</span>']),
    ]
    if row.reason or row.detail:
        cells.append(f'<span class="why">{_why(row)}</span>')
    return " ".join(filter(None, cells))


def _why(row: LayerRow) -> str:
    """A badge, and of the sentence what the badge doesn't say."""
    if row.reason is None:
        return escape(row.detail)
    badge = "never run" if row.reason is Reason.NEVER_CALLED and not row.depth else _BADGES[row.reason]
    before, said, after = row.detail.partition(badge)
    rest = row.detail
    if said and before in ("", "called, but ", "built, but "):
        rest = after.lstrip(",;: ")
    elif said and not after:
        rest = before.removesuffix(", which was ")
    return f'<span class="badge{" suspect" * _is_suspect(row)}">{badge}</span> {escape(rest)}'


def _place(where: str) -> str:
    """A file and a line, which may be broken after a folder."""
    return escape(where).replace(os.sep, f"{os.sep}<wbr>")


def _name(row: LayerRow, link: str) -> str:
    """In the tree a layer's key, which its ancestors complete; in a list a link with its dotted name."""
    if not row.depth:
        return f'<span class="key" title="{escape(row.cls_name)}">{escape(row.cls_name)}</span>'
    key = f'<span class="key" title="{escape(row.name)}">{escape(row.key)}</span>'
    if link:
        key = f'<a class="key" href="{link}">{escape(row.name)}</a>'
    deep = f' <span class="deep">depth {row.depth}</span>' if row.depth > _INDENTED and not link else ""
    return f'{key} <span class="cls">{escape(row.cls_name)}</span>{deep}'


def _tag(row: LayerRow) -> str:
    if row.used:
        return '<span class="tag may">optional</span>' if row.optional else ""
    if row.optional:
        return '<span class="tag not may">optional, unused</span>'
    return '<span class="tag not">unused</span>'


def _none(row: LayerRow) -> str:
    """What stands where there are no figures."""
    return "no parameters" if row.sized else "sizes not known yet"


def _figures(row: LayerRow, total: int) -> Iterator[str]:
    """Parameters and bytes of a layer and all below it, and the bar: what is allocated, then what is deferred."""
    own = ""
    if 0 < row.num_parameters < row.total_parameters:
        own = f' <span class="part">{row.num_parameters:,} its own</span>'
    words = " parameter" if row.total_parameters == 1 else " parameters"
    more = "" if row.sized else " + ?"
    yield f'<span class="count">{row.total_parameters:,}{more}<span class="u">{words}</span>{own}</span>'
    deferred = ' <span class="u">deferred</span>'
    if row.deferred_nbytes < row.total_nbytes:
        deferred = f' <span class="part">{format_bytes(row.deferred_nbytes)} deferred</span>'
    shares = (row.total_nbytes - row.deferred_nbytes, row.deferred_nbytes)
    a, d = (f"{max(100 * share / total, 2):.3g}%" if share else "0" for share in shares)  # at least to be seen
    yield f'<span class="bar" aria-hidden="true" style="--a:{a};--d:{d}"></span>'
    yield f'<span class="bytes">{format_bytes(row.total_nbytes)}{more}{deferred if row.deferred_nbytes else ""}</span>'


_TOOLS = """<search class="tools" id="tools" hidden>
<label for="search">Search layers</label>
<input id="search" type="search" placeholder="name, class, state or reason" autocomplete="off" spellcheck="false">
<label class="check"><input id="only" type="checkbox" autocomplete="off"> Only what needs a look</label>
<button type="button" id="expand">Expand all</button>
<button type="button" id="collapse">Collapse all</button>
<p id="status" role="status" aria-live="polite">All layers are shown</p>
</search>"""

_LEGEND = """<p class="legend">
<span><span class="bar" style="--a:100%;--d:0"></span> allocated</span>
<span><span class="bar" style="--a:0;--d:100%"></span> deferred</span>
<span class="unused"><span class="bar" style="--a:100%;--d:0"></span> unused</span>
<span class="unused"><span class="bar" style="--a:0;--d:100%"></span> unused and deferred</span>
</p>
<div class="row heads" aria-hidden="true"><span class="name">Layer</span> <span class="where">Assigned at</span>
<span class="state">State</span> <span class="count">Parameters</span> <span class="bytes">Bytes</span></div>"""

_STYLE = """
:root { color-scheme: light dark; --back: #f6f7f8; --card: #fff; --text: #1d2329; --soft: #56606b; --line: #dfe3e8;
  --link: #0a5bb5; --fill: #3b73b9; --track: #e9ecf0; --warn: #864800; --warn-back: #fff1da; --warn-fill: #b86a0c;
  --may: #5b4a94; --may-fill: #7a68b8; --hit: #fff7cc; --badge: #eaedf1; }
@media (prefers-color-scheme: dark) {
  :root { --back: #121518; --card: #1a1e23; --text: #e5e8ec; --soft: #a3adb8; --line: #31383f;
    --link: #84b9f7; --fill: #5f9be4; --track: #2a3037; --warn: #f3ba6c; --warn-back: #3b2a12; --warn-fill: #d9923a;
    --may: #c5b8f2; --may-fill: #9a88d8; --hit: #3a3716; --badge: #2d343b; } }
* { box-sizing: border-box; }
html { scroll-padding: 6rem 0 2rem; -webkit-text-size-adjust: 100%; }
body { margin: 0 auto; padding: 1.5rem 1.5rem 4rem; max-width: 76rem; background: var(--back); color: var(--text);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
h1, h2, h3 { line-height: 1.25; margin: 0; overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.3rem; } h3 { font-size: 1rem; margin: 1.5rem 0 .5rem; }
a { color: var(--link); text-underline-offset: .15em; overflow-wrap: anywhere; }
:focus-visible { outline: 2px solid var(--link); outline-offset: 2px; border-radius: 4px; }
ul, ol { list-style: none; margin: 0; padding: 0; } dl, dd, p { margin: 0; }
nav ol { display: flex; flex-wrap: wrap; gap: .25rem 1rem; margin-top: .5rem; }
[hidden] { display: none !important; }
section { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 1.25rem 1.5rem 1.5rem;
  margin-top: 1rem; }
.times { font-size: .8rem; font-weight: 500; color: var(--soft); background: var(--badge); border-radius: 1rem;
  padding: .1rem .6rem; vertical-align: .1em; white-space: nowrap; }
.tools { display: flex; flex-wrap: wrap; align-items: center; gap: .5rem .75rem; padding: .75rem 0; margin-top: .5rem;
  background: var(--back); z-index: 1; }
@media (min-height: 30rem) { .tools { position: sticky; top: 0; } }  /* small and zoomed screens need the room */
.tools input[type=search] { flex: 1 1 14rem; min-width: 0; }
.tools input[type=search], button { font: inherit; color: inherit; background: var(--card); padding: .35rem .7rem;
  border: 1px solid var(--soft); border-radius: 6px; }
button { cursor: pointer; } button:hover { border-color: var(--text); }
.check { display: flex; align-items: center; gap: .4rem; } .check input { width: 1.1em; height: 1.1em; margin: 0; }
.left-out { color: var(--soft); margin-top: .5rem; }
#status { flex-basis: 100%; color: var(--soft); font-size: .87rem; }
::placeholder { color: var(--soft); opacity: 1; }
.filtering .overview { display: none; }
.sums { display: grid; grid-template-columns: repeat(auto-fit, minmax(10rem, 1fr)); gap: 1rem 1.5rem;
  margin-top: 1rem; }
dt, .sums dd { color: var(--soft); font-size: .85rem; line-height: 1.4; }
.sums .figure { color: var(--text); font-size: 1.25rem; font-weight: 600; font-variant-numeric: tabular-nums; }
summary { cursor: pointer; list-style: none; position: relative; } .suspects > summary { padding-left: 1.4rem; }
summary::-webkit-details-marker { display: none; } summary h3 { display: inline-block; }
summary::before { content: ""; position: absolute; left: .4rem; top: .7rem; border: .3rem solid transparent;
  border-left: .42rem solid var(--soft); }
details[open] > summary::before { left: .3rem; top: .85rem; border-color: var(--soft) transparent transparent; }
.suspects > summary::before { margin-top: 1.13rem; }
.cls, .deep, .where, .state, .legend, .none, .part { color: var(--soft); }
.where, .state, .legend, .none, .part, .why, .deep { font-size: .87rem; }
.legend { display: flex; flex-wrap: wrap; gap: .25rem 1.25rem; margin-bottom: .4rem; }
.legend .bar { display: inline-flex; width: 1.8rem; vertical-align: -.05em; margin-right: .25rem; }
.row { display: grid; grid-template-columns: minmax(0, 1fr) 9rem 7rem 7.5rem 7rem 8.3rem; column-gap: .9rem;
  align-items: baseline; padding: .3rem .5rem .3rem 1.4rem; border-top: 1px solid var(--line); }
.row > span { overflow-wrap: anywhere; } summary.row:hover { background: var(--badge); }
.name { grid-area: 1 / 1; } .where { grid-area: 1 / 2; } .state { grid-area: 1 / 3; } .count { grid-area: 1 / 4; }
.row > .bar { grid-area: 1 / 5; margin-top: .4rem; align-self: start; } .bytes { grid-area: 1 / 6; }
.why { grid-area: 2 / 1 / auto / -1; padding: .1rem 0 .2rem; }
.key { font-weight: 600; } .part { display: block; }
.count, .bytes { text-align: right; font-variant-numeric: tabular-nums; }
.tree details > ul { margin-left: .55rem; border-left: 1px solid var(--line); padding-left: .55rem; }
.tree [data-depth="10"] ul { margin: 0; padding: 0; border: 0; }
.row.heads { border: 0; color: var(--soft); font-size: .87rem; }
.state::before { content: ""; display: inline-block; width: .6em; height: .6em; margin-right: .45em; border-radius: 50%;
  border: 1.5px solid var(--soft); }
.heads .state::before { display: none; }
.state[data-state=touched]::before { background: var(--soft); }
.state[data-state=materialized]::before { background: linear-gradient(90deg, var(--soft) 50%, transparent 50%); }
.heads .state, .heads .where { font-size: inherit; }
.tag, .badge { font-size: .78rem; font-weight: 600; border-radius: 4px; padding: .08rem .4rem; white-space: nowrap; }
.badge { background: var(--badge); }
.badge.suspect { border: 1px solid; color: var(--warn); background: var(--warn-back); }
.badge.suspect::before { content: "! "; content: "! " / ""; }
.tag { border: 1px solid; color: var(--warn); background: var(--warn-back); }
.tag.not::before { content: "× "; content: "× " / ""; }
.tag.not.may::before { content: "◇ "; content: "◇ " / ""; }
.tag.may { color: var(--may); background: none; border-style: dashed; }
.bar { display: flex; height: .7rem; background: var(--track); border-radius: 2px; overflow: hidden;
  forced-color-adjust: none; }
.bar::before { content: ""; width: var(--a); background: var(--fill); }
.bar::after { content: ""; width: var(--d); box-shadow: inset 0 0 0 1.5px var(--fill); background: var(--card); }
.unused { --fill: var(--warn-fill); } .unused.optional { --fill: var(--may-fill); }
.unused .bar::before { background: repeating-linear-gradient(135deg, var(--fill) 0 4px, var(--card) 4px 6px); }
.unused .bar::after { background: repeating-linear-gradient(135deg, var(--fill) 0 1px, var(--card) 1px 6px); }
.hit > .row, .hit > details > .row, :target > .row, :target > details > .row { background: var(--hit); }
.u { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); white-space: nowrap; }
@media (max-width: 66rem) {
  body { padding: 1rem .75rem 3rem; font-size: 14px; } section { padding: 1rem .75rem; }
  .tools label[for] { flex-basis: 100%; margin-bottom: -.4rem; } .tools input[type=search] { flex-basis: 100%; }
  .sums { grid-template-columns: repeat(auto-fit, minmax(8.5rem, 1fr)); }
  .row { display: flex; flex-wrap: wrap; gap: 0 .7rem; } .row.heads { display: none; }
  .u { position: static; width: auto; height: auto; clip-path: none; } .part { display: inline; }
  .name, .why, .row > .bar { flex-basis: 100%; } .row > .bar { height: .45rem; margin: .25rem 0; order: 1; }
  .why { order: 2; } .where { order: 3; flex-basis: 100%; }
  .tree details > ul { margin-left: .25rem; padding-left: .3rem; } }
@media print { .tools { display: none; } section { border: 0; padding: 0; } }
"""

_SCRIPT = """
(() => {
  "use strict";
  const [tools, search, only, status] = ["tools", "search", "only", "status"].map((id) => document.getElementById(id));
  const items = [], line = [];  // line: the layers from a net down to the one at hand
  for (const li of document.querySelectorAll(".tree li")) {
    const depth = Number(li.dataset.depth), row = li.querySelector(".row");
    const parts = [...row.querySelectorAll(".key, .cls, .state, .tag, .badge")];
    const text = parts.map((part) => part.title + " " + part.textContent).join(" ").toLowerCase();
    const details = row.parentElement.matches("details") ? row.parentElement : null;
    line[depth] = { li, details, parent: line[depth - 1], text };
    items.push(line[depth]);
  }
  let before = null;  // what was open before layers were filtered

  const filter = () => {
    const words = search.value.toLowerCase().split(/\\s+/).filter(Boolean);
    const filtering = words.length > 0 || only.checked;
    if (!filtering && !before) return;
    before ??= items.map(({ details }) => details?.open);
    let hits = 0;
    for (const item of items) {
      item.shown = item.hit = filtering && words.every((word) => item.text.includes(word))
        && (!only.checked || item.li.matches(".unused, .suspect"));
      item.open = false;
      hits += item.hit;
    }
    for (const { hit, parent } of items) {
      for (let above = hit && parent; above && !above.open; above = above.parent) above.shown = above.open = true;
    }
    items.forEach((item, i) => {
      item.li.hidden = filtering && !item.shown;
      item.li.classList.toggle("hit", item.hit);
      if (item.details) item.details.open = filtering ? item.open : before[i];
    });
    for (const part of document.querySelectorAll("section")) part.hidden = part.querySelector(".tree > li").hidden;
    document.body.classList.toggle("filtering", filtering);
    if (!filtering) before = null;
    const found = hits === 1 ? "1 layer matches" : `${hits || "No"} layers match`;
    status.textContent = filtering ? found : "All layers are shown";
  };

  const clear = () => { search.value = ""; only.checked = false; filter(); };
  const reveal = (hash) => {  // not all browsers open closed details by themselves, and none ends a filter
    const target = hash.length > 1 && document.getElementById(hash.slice(1));
    if (!target) return;
    clear();
    for (let at = target.parentElement; at; at = at.parentElement) if (at.matches("details")) at.open = true;
  };
  const toggle = (open) => () => {
    for (const { details, parent } of items) if (details) details.open = open || !parent;
  };

  search.addEventListener("input", filter);
  only.addEventListener("change", filter);
  document.getElementById("expand").addEventListener("click", toggle(true));
  document.getElementById("collapse").addEventListener("click", toggle(false));
  document.addEventListener("keydown", (event) => { if (event.key === "Escape" && before) clear(); });
  document.addEventListener("click", ({ target }) => { if (target.matches('a[href^="#"]')) reveal(target.hash); });
  tools.hidden = false;
  reveal(location.hash);
})();
"""
