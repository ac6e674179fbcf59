"""The HTML report, as text and in a browser."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from html.parser import HTMLParser
from typing import TYPE_CHECKING, Any

import pytest

from lazycell._html import page
from lazycell._rows import LayerRow, NetReport, Reason, Summary

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page, Route

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
ADDRESS = "http://report.test/"
VOID = {"meta", "input", "br", "img", "link", "hr", "wbr"}
HOSTILE = "<script>alert(1)</script>\"><img src=x onerror='alert(1)'>&lt;"


def layer(name: str, cls_name: str = "Dense", **changes: Any) -> LayerRow:
    """A used layer with ten parameters, unless changes say otherwise."""
    fields: dict[str, Any] = {"state": "touched", "used": True, "optional": False, "num_parameters": 10}
    fields |= {"order": 0, "where": "net.py:1", "reason": None, "detail": "", "key": name.split(".")[-1]}
    fields |= {"depth": name.count(".") + 1 if name else 0, "deferred_nbytes": 0} | changes
    fields.setdefault("nbytes", 4 * fields["num_parameters"])
    fields.setdefault("total_parameters", fields["num_parameters"])
    fields.setdefault("total_nbytes", 4 * fields["total_parameters"])
    return LayerRow(name=name, cls_name=cls_name, **fields)


def unused(name: str, cls_name: str = "Dense", **changes: Any) -> LayerRow:
    """A layer that was never called and isn't allocated."""
    fields: dict[str, Any] = {"state": "deferred", "used": False, "order": None, "deferred_nbytes": 40}
    fields |= {"reason": Reason.NEVER_CALLED, "detail": "It was never called."}
    return layer(name, cls_name, **{**fields, **changes})


def net(*layers: LayerRow, cls_name: str = "Net", times: int = 1, num_steps: int = 3) -> NetReport:
    """A net of layers, with the sums of these."""
    size, used = sum(row.num_parameters for row in layers), sum(row.used for row in layers)
    deferred = sum(row.deferred_nbytes for row in layers if not row.total_parameters > row.num_parameters)
    root = layer("", cls_name, num_parameters=0, total_parameters=size, deferred_nbytes=deferred, where=None)
    sums = Summary(
        num_layers=len(layers),
        used_layers=used,
        unused_layers=len(layers) - used,
        num_parameters=size,
        touched_parameters=sum(row.num_parameters for row in layers if row.used),
        nbytes=4 * size,
        allocated_nbytes=4 * size - deferred,
        deferred_nbytes=deferred,
        gradient_nbytes=2048,
        moment_nbytes=4096,
        num_steps=num_steps,
    )
    return NetReport(cls_name, (root, *layers), sums, times)


def example() -> NetReport:
    """A net in which there is everything: reasons, states, containers, unused layers inside and out."""
    return net(
        layer("stem", "Conv2d", reason=Reason.FROZEN, detail="It doesn't require a gradient."),
        layer("body", "SequentialCell", num_parameters=0, total_parameters=30, deferred_nbytes=40),
        layer("body.first", "Conv2d"),
        unused("body.spare", "Conv2d"),
        layer("body.norm", "BatchNorm2d", reason=Reason.SOME_STEPS, detail="In 2 of 3 steps."),
        unused("aux", "AuxHead", num_parameters=0, total_parameters=20, deferred_nbytes=80),
        unused("aux.fc"),
        unused("aux.out", num_parameters=10, state="materialized", deferred_nbytes=0),
        unused("distill", optional=True),
        layer("relu", "ReLU", num_parameters=0),
        layer("stop", reason=Reason.CUT_OFF, detail="called, but cut off from the loss: no gradient arrived at it"),
        layer("head", reason=Reason.NOT_IN_OPTIMIZER, detail="not in the optimizer"),
    )


def large() -> NetReport:
    """Two thousand layers: 200 blocks of one container and nine layers."""
    rows: list[LayerRow] = []
    for block in range(200):
        rows.append(layer(f"block{block}", "Block", num_parameters=0, total_parameters=90))
        rows.extend(layer(f"block{block}.layer{part}", f"Kind{part}") for part in range(8))
        rows.append((unused if block % 50 == 7 else layer)(f"block{block}.last", "Kind8"))
    return net(*rows, cls_name="Large")


def deep(depth: int) -> NetReport:
    """Containers within each other."""
    names = [".".join(["a"] * position) for position in range(1, depth + 1)]
    return net(*(layer(name, f"Level{level}") for level, name in enumerate(names, 1)), cls_name="Deep")


# ---------------------------------------------------------------------------------------------
# As text


class Document(HTMLParser):
    """Reads a page and notes its tags, attributes and texts; refuses tags that aren't balanced."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.texts: list[str] = []
        self.deepest = 0
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes.extend((name, value or "") for name, value in attrs)
        if tag not in VOID:
            self._open.append(tag)
            self.deepest = max(self.deepest, len(self._open))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    def values(self, name: str) -> list[str]:
        """The values of all attributes of a name."""
        return [value for key, value in self.attributes if key == name]


@pytest.mark.parametrize("report", [example(), large(), deep(500), net()], ids=["example", "large", "deep", "empty"])
def test_tags_are_balanced(report: NetReport) -> None:
    """Whatever its shape, every element is closed where it ought to be, and each layer has its item."""
    document = Document(page([report]))
    assert len(document.values("data-depth")) == len(report.layers)


def test_no_deeper_than_browsers_can_nest() -> None:
    """A tree of any depth stays far below the 512 elements after which browsers flatten it themselves."""
    assert Document(page([deep(500)])).deepest < 200


def test_names_are_harmless() -> None:
    """Markup in names, classes, details, places and the title stays text."""
    row = unused(HOSTILE, HOSTILE, key=HOSTILE, where=HOSTILE, detail=HOSTILE, state=HOSTILE)
    hostile, tame = (
        Document(page([net(each, cls_name=name), net(cls_name=name)], title=name))
        for each, name in ((row, HOSTILE), (unused("a", "a"), "a"))
    )
    assert [tag for tag in hostile.tags if tag != "wbr"] == [tag for tag in tame.tags if tag != "wbr"]
    assert [name for name, _ in hostile.attributes] == [name for name, _ in tame.attributes]
    assert not any(name.startswith("on") for name, _ in hostile.attributes)
    assert sum(HOSTILE in text for text in hostile.texts) == 16
    assert "".join(hostile.texts).count(HOSTILE) == 18  # places may be broken between folders


def test_ids_are_unique_and_references_lead_somewhere() -> None:
    """Also with several nets of the same names in one page."""
    document = Document(page([example(), example(), large()]))
    ids = document.values("id")
    assert len(ids) == len(set(ids))
    links = [href.removeprefix("#") for href in document.values("href")]
    assert len(links) == 3 + 5 + 5 + 4
    assert {*links, *document.values("for"), *document.values("aria-labelledby")} <= set(ids)


def test_nothing_is_loaded_from_elsewhere() -> None:
    """Neither in markup nor in styles nor in the script."""
    assert not re.findall(r"https?:|//\w|\bsrc\s*=|url\(|@import|<link|<iframe|fetch\(", page([example(), large()]))


def test_same_nets_same_page() -> None:
    """No time, no random number, no address of an object."""
    assert page([example(), deep(3)]) == page([example(), deep(3)])


def test_two_thousand_layers_fit() -> None:
    """The page of a very large net is one that can be sent around."""
    assert len(page([large()]).encode()) < 2_500_000


def test_sums_are_told() -> None:
    """Layers, parameters, bytes, what was spared, steps, and how many nets there are like it."""
    text = " ".join(Document(page([net(layer("a"), unused("b"), times=20)])).texts)
    for words in ("1 used, 1 unused", "10 touched", "40 B allocated, 40 B deferred", "2 KB", "4 KB"):
        assert words in text
    assert "20 nets like this" in text
    assert "3 gradient computations" in text and "no gradient computation" not in text
    assert "1 gradient computation" in " ".join(Document(page([net(layer("a"), num_steps=1)])).texts)


def test_no_steps_are_told() -> None:
    """If no gradient was computed, the page says so; a net that stands for itself has no count."""
    text = " ".join(Document(page([net(layer("a"), num_steps=0)])).texts)
    assert "no gradient computation was seen" in text and "nets like this" not in text


def test_nets_that_are_left_out() -> None:
    """Their number is said at the top, if there are any."""
    assert "2 more nets of other kinds are left out." in Document(page([example()], left_out=2)).texts
    assert "left out" not in page([example()])


SENTENCES = [
    (Reason.NEVER_CALLED, "never called", "never called "),
    (Reason.NEVER_CALLED, "never called, and declared optional", "never called and declared optional"),
    (Reason.NEVER_CALLED, "never called; it is MindSpore's own", "never called it is MindSpore's own"),
    (Reason.NEVER_CALLED, "within aux, which was never called", "never called within aux"),
    (Reason.NEVER_CALLED, "within the net, which was never run", "never called within the net, which was never run"),
    (Reason.NOT_IN_OPTIMIZER, "not in the optimizer", "not in the optimizer "),
    (Reason.CUT_OFF, "called, but cut off from the loss: no gradient arrived at it (5 computations)",
     "cut off from the loss no gradient arrived at it (5 computations)"),
    (Reason.FROZEN, "requires no gradient", "frozen requires no gradient"),
    (Reason.SOME_STEPS, "reached in 1 of 3 steps: step 2", "some steps reached in 1 of 3 steps: step 2"),
    (None, "no gradient arrived at it in 1 of 2 computations; the others weren't looked at",
     "no gradient arrived at it in 1 of 2 computations; the others weren't looked at"),
]  # fmt: skip


@pytest.mark.parametrize("reason, detail, words", SENTENCES)
def test_badges_and_sentences_complete_each_other(reason: Reason | None, detail: str, words: str) -> None:
    """Neither repeats the other, and nothing is lost."""
    document = Document(page([net(layer("a", reason=reason, detail=detail))]))
    assert "".join(document.texts).count(words) == (2 if reason in (Reason.CUT_OFF, Reason.NOT_IN_OPTIMIZER) else 1)


def test_a_net_that_was_never_run() -> None:
    """Nothing is listed against its layers."""
    report = net(unused("a", detail="within the net, which was never run"), unused("b"))
    root = replace(report.layers[0], used=False, reason=Reason.NEVER_CALLED, detail="built, but never run")
    told = page([replace(report, layers=(root, *report.layers[1:]))])
    assert "The net was built, but never run." in told and "<a class" not in told
    assert 'class="badge">never run</span> ' in told


def test_places_break_between_words() -> None:
    """After folders."""
    where = os.path.join("deep", "er", "my_net.py:12")
    assert where.replace(os.sep, f"{os.sep}<wbr>") in page([net(layer("a", where=where))])


def test_without_nets() -> None:
    """An empty report is a page all the same."""
    assert "No net was seen." in Document(page([])).texts


def test_large_nets_start_short() -> None:
    """Blocks of a large net are closed at first, those of a small one open, and unused ones always closed."""
    assert page([large()]).count("<details open><summary class") == 1
    assert page([example()]).count("<details open><summary class") == 2
    assert page([example()]).count("<details><summary class") == 1


# ---------------------------------------------------------------------------------------------
# In a browser

Visit = Callable[..., "Page"]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A headless Chromium that is installed on this machine."""
    api = pytest.importorskip("playwright.sync_api", reason="needs the package playwright")
    executable = next(filter(None, map(shutil.which, BROWSERS)), None)
    if executable is None:
        pytest.skip(f"needs one of {', '.join(BROWSERS)} on PATH")
    with api.sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        yield launched
        launched.close()


@pytest.fixture
def troubles() -> list[str]:
    """What went wrong in the browser: messages on its console, errors of the script, requests."""
    return []


@pytest.fixture
def visit(browser: Browser, troubles: list[str]) -> Iterator[Visit]:
    """Shows nets in a browser; nothing may go wrong meanwhile."""
    contexts = []

    def show(*nets: NetReport, **options: Any) -> Page:
        text = page(nets)
        context = browser.new_context(**{"viewport": {"width": 1200, "height": 900}, **options})
        contexts.append(context)

        def answer(route: Route) -> None:
            if route.request.url == ADDRESS and route.request.is_navigation_request():
                route.fulfill(body=text, content_type="text/html; charset=utf-8")
            else:
                troubles.append(f"asked for {route.request.url}")
                route.abort()

        context.route("**/*", answer)
        shown = context.new_page()
        shown.on("console", lambda message: troubles.append(message.text))
        shown.on("pageerror", lambda error: troubles.append(str(error)))
        shown.goto(ADDRESS)
        return shown

    yield show
    for context in contexts:
        context.close()
    assert troubles == []


def items(shown: Page) -> Locator:
    """The layers in the tree that can be seen."""
    return shown.locator(".tree li:visible")


def keys(shown: Page) -> list[str]:
    """Their dotted names."""
    return [key.get_attribute("title") or "" for key in shown.locator(".tree .key:visible").all()]


def search(shown: Page, text: str) -> None:
    """Type into the search box, found by its label."""
    shown.get_by_label("Search layers").fill(text)


def test_loads_without_trouble(visit: Visit, troubles: list[str]) -> None:
    """No message, no error, no request; the script has run."""
    shown = visit(example(), net(unused(HOSTILE, HOSTILE, key=HOSTILE, detail=HOSTILE), cls_name=HOSTILE))
    shown.wait_for_load_state("networkidle")
    assert shown.title() == "lazycell report"
    assert shown.get_by_role("search").is_visible()
    assert shown.get_by_role("heading", level=2).all_inner_texts() == ["Net", HOSTILE]
    assert troubles == []


CONTRASTS = """selectors => {
  const parse = text => { const [r, g, b, a = 1] = text.match(/[\\d.]+/g).map(Number); return {r, g, b, a}; };
  const linear = x => x <= .04045 ? x / 12.92 : ((x + .055) / 1.055) ** 2.4;
  const light = ({r, g, b}) => .2126 * linear(r / 255) + .7152 * linear(g / 255) + .0722 * linear(b / 255);
  const back = e => { const c = parse(getComputedStyle(e).backgroundColor); return c.a ? c : back(e.parentElement); };
  const ratio = (a, b) => (Math.max(a, b) + .05) / (Math.min(a, b) + .05);
  const text = e => parse(getComputedStyle(e, e.placeholder ? "::placeholder" : null).color);
  return selectors.flatMap(s => {
    const found = [...document.querySelectorAll(s)].filter(e => e.checkVisibility());
    return found.length ? found.map(e => [s, ratio(light(text(e)), light(back(e)))]) : [[s, 0]];
  });
}"""
TEXTS = ("h1", "h2", "h3", "p", "label", "button", "dt", ".figure", "dd", ".key", ".cls", ".state", ".where", ".count")
MORE_TEXTS = (".bytes", ".part", ".why", ".badge", ".tag.not", ".tag.may", ".none", ".heads .name", "#search", "a.key")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_stand_out(visit: Visit, scheme: str) -> None:
    """Contrast is at least 4.5 to 1 for all texts in both colour schemes, which do differ."""
    shown = visit(example(), color_scheme=scheme)
    ratios = shown.evaluate(CONTRASTS, [*TEXTS, *MORE_TEXTS, ".badge.suspect"])
    assert [pair for pair in ratios if pair[1] < 4.5] == []
    background = shown.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", background))) > 600) == (scheme == "light")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_matches_stand_out(visit: Visit, scheme: str) -> None:
    """Also on the background of a layer that matches."""
    shown = visit(example(), color_scheme=scheme)
    search(shown, "e")
    ratios = shown.evaluate(CONTRASTS, [".hit .key", ".hit .cls", ".hit .state", ".hit .tag.not", ".hit .tag.may"])
    assert len(ratios) > 20 and [pair for pair in ratios if pair[1] < 4.5] == []


@pytest.mark.parametrize(
    "report",
    [example(), deep(60), net(unused("x" * 200, "Y" * 200, where="z" * 200), cls_name="N" * 100, times=20)],
    ids=["example", "deep", "long"],
)
def test_fits_a_phone(visit: Visit, report: NetReport) -> None:
    """Nothing scrolls sideways, is cut off, or is squeezed to nothing."""
    shown = visit(report, viewport={"width": 375, "height": 800})
    shown.get_by_role("button", name="Expand all").click()
    assert shown.evaluate("document.documentElement.scrollWidth <= innerWidth")
    boxes = [item.bounding_box() or {} for item in shown.locator(".row:visible, .sums > div, .tools > *").all()]
    assert max(box["x"] + box["width"] for box in boxes) <= 375
    rows = [item.bounding_box() or {} for item in shown.locator(".tree .row").all()]
    assert min(box["width"] for box in rows) > 200


def test_search_shows_matches_with_their_ancestors(visit: Visit) -> None:
    """By name, class, state or reason; words narrow each other down."""
    shown = visit(example())
    for text, found in {
        "fc": ["Net", "aux", "aux.fc"],
        "BATCHNORM": ["Net", "body", "body.norm"],
        "materialized": ["Net", "aux", "aux.out"],
        "some steps": ["Net", "body", "body.norm"],
        "conv2d unused": ["Net", "body", "body.spare"],
        "not in the optimizer": ["Net", "head"],
        "optional": ["Net", "distill"],
        "body.f": ["Net", "body", "body.first"],
        "net.py": [],
    }.items():
        search(shown, text)
        assert keys(shown) == found, text


def test_escape_clears_the_search(visit: Visit) -> None:
    """What was open and closed before is so again, wherever the focus is."""
    shown = visit(example())
    shown.locator("summary", has_text="body").click()
    before = keys(shown)
    search(shown, "fc")
    assert keys(shown) != before
    shown.get_by_role("button", name="Expand all").focus()
    shown.keyboard.press("Escape")
    assert keys(shown) == before
    assert shown.get_by_label("Search layers").input_value() == ""


def test_number_of_matches_is_announced(visit: Visit) -> None:
    """In a live region that a screen reader reads."""
    shown = visit(example())
    status = shown.get_by_role("status")
    assert status.get_attribute("aria-live") == "polite"
    said = []
    for text in ("fc", "conv2d", "nowhere", ""):
        search(shown, text)
        said.append(status.inner_text())
    assert said == ["1 layer matches", "3 layers match", "No layers match", "All layers are shown"]


def test_only_what_needs_a_look(visit: Visit) -> None:
    """A filter that narrows a search, and that Escape lifts, too."""
    shown = visit(example())
    total = len(keys(shown))
    shown.get_by_label("Only what needs a look").check()
    assert keys(shown) == ["Net", "body", "body.spare", "aux", "aux.fc", "aux.out", "distill", "stop", "head"]
    search(shown, "Dense")
    assert keys(shown) == ["Net", "aux", "aux.fc", "aux.out", "distill", "stop", "head"]
    shown.keyboard.press("Escape")
    assert len(keys(shown)) == total and not shown.get_by_label("Only what needs a look").is_checked()


def test_nets_without_matches_go_away(visit: Visit) -> None:
    """Only sections with something to see remain."""
    shown = visit(example(), net(layer("other"), cls_name="Second"))
    search(shown, "other")
    assert shown.get_by_role("heading", level=2).all_inner_texts() == ["Second"]


def test_keyboard_opens_and_closes(visit: Visit) -> None:
    """Tab leads to the layers that hold others; Enter and Space open and close them."""
    shown = visit(example())
    shown.get_by_role("button", name="Collapse all").focus()
    for _ in range(20):
        shown.keyboard.press("Tab")
        if shown.locator("summary:focus", has_text="body").count():
            break
    assert shown.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    spare = shown.locator(".tree .key", has_text="spare")
    assert spare.is_visible()
    shown.keyboard.press("Enter")
    assert not spare.is_visible()
    shown.keyboard.press("Space")
    assert spare.is_visible()


def test_all_at_once(visit: Visit) -> None:
    """Buttons open and close everything; the net itself stays open."""
    shown = visit(example())
    shown.get_by_role("button", name="Expand all").click()
    assert items(shown).count() == 13
    shown.get_by_role("button", name="Collapse all").click()
    assert keys(shown) == ["Net", "stem", "body", "aux", "distill", "relu", "stop", "head"]


@pytest.mark.parametrize("script", [True, False], ids=["script", "no script"])
def test_links_open_what_is_above(visit: Visit, script: bool) -> None:
    """Each unused layer's link leads to its place; by script where a browser doesn't open closed ones itself."""
    shown = visit(large(), java_script_enabled=script)
    target = shown.locator(".tree [title='block57.last']")
    assert not target.is_visible()
    if script:
        shown.evaluate("document.addEventListener('click', event => event.preventDefault(), true)")
    shown.get_by_role("link", name="block57.last").click()
    assert target.is_visible()


def test_links_move_the_focus(visit: Visit) -> None:
    """The next Tab goes on from the layer that was linked to, and the layer is in sight."""
    shown = visit(large())
    shown.get_by_role("link", name="block57.last").click()
    focused = shown.locator(".tree li:focus")
    assert focused.locator(".key").first.get_attribute("title") == "block57.last"
    top = (focused.bounding_box() or {})["y"]
    bar = shown.get_by_role("search").bounding_box() or {}
    assert bar["y"] + bar["height"] <= top < 900


def test_links_to_nets_end_a_search(visit: Visit) -> None:
    """A net that the search has hidden is shown once its link is followed."""
    shown = visit(example(), net(layer("other"), cls_name="Second"))
    search(shown, "other")
    shown.get_by_role("navigation", name="Nets").get_by_role("link", name="Net", exact=True).click()
    assert shown.get_by_role("heading", level=2, name="Net", exact=True).is_visible()


def accessible_names(shown: Page, role: str) -> list[str]:
    """The names of all nodes of a role in the accessibility tree, which is what screen readers are given."""
    session = shown.context.new_cdp_session(shown)
    nodes = session.send("Accessibility.getFullAXTree")["nodes"]
    said = [node for node in nodes if not node["ignored"] and node["role"]["value"].startswith(role)]
    return [re.sub(r"\s+", " ", node["name"]["value"]).strip() for node in said]


def test_screen_readers_are_told_everything(visit: Visit) -> None:
    """A layer's row says in words what bars, shapes and columns show; decoration says nothing."""
    names = accessible_names(visit(example()), "DisclosureTriangle")
    assert (
        "aux AuxHead unused assigned at net.py:1 deferred 20 parameters 80 B deferred never called It was never called."
        in names
    )
    assert "body SequentialCell assigned at net.py:1 touched 30 parameters 120 B 40 B deferred" in names


def test_landmarks_and_lists(visit: Visit) -> None:
    """A page is found one's way around in by landmarks, headings and lists."""
    shown = visit(example(), large())
    assert shown.locator("html").get_attribute("lang") == "en"
    for role in ("main", "banner", "search", "navigation"):
        assert shown.get_by_role(role).count() == 1
    assert shown.get_by_role("heading", level=1).count() == 1
    assert shown.get_by_role("region", name="Large").count() == 1
    tree = shown.get_by_role("list", name="Layers of Net")
    assert tree.get_by_role("listitem").count() == 11
    assert [name for name in accessible_names(shown, "list") if name.startswith("Layers of")] == [
        "Layers of Net",
        "Layers of Large",
    ]


LOOKS = """row => {
  const [bar, tag] = [row.querySelector(".bar"), row.querySelector(".tag")];
  const [solid, hollow] = ["::before", "::after"].map(part => getComputedStyle(bar, part));
  const bars = [solid.width !== "0px" && "allocated", hollow.width !== "0px" && "deferred",
    solid.backgroundImage.includes("repeating") && "striped"].filter(Boolean);
  const icon = tag && getComputedStyle(tag, "::before").content[1];
  return [bars.join(" "), ...(tag ? [tag.textContent, icon, getComputedStyle(tag).borderStyle] : [])];
}"""


def test_unused_layers_look_different(visit: Visit) -> None:
    """By words, icons, lines and stripes, not only by colour; optional ones again differently."""
    shown = visit(example())
    shown.get_by_role("button", name="Expand all").click()
    looks = {
        "body.first": ["allocated"],
        "body": ["allocated deferred"],
        "aux.out": ["allocated striped", "unused", "×", "solid"],
        "body.spare": ["deferred striped", "unused", "×", "solid"],
        "distill": ["deferred striped", "optional, unused", "◇", "dashed"],
    }
    rows = {name: shown.locator(f".tree .row:has(> .name > [title='{name}'])") for name in looks}
    assert {name: row.evaluate(LOOKS) for name, row in rows.items()} == looks


def test_suspects_stand_out(visit: Visit) -> None:
    """What was called and doesn't learn has a badge with a mark and a border, and is listed with what is unused."""
    shown = visit(example())
    badge = "e => [getComputedStyle(e, '::before').content[1], getComputedStyle(e).borderStyle]"
    looks = {mark.inner_text(): mark.evaluate(badge) for mark in shown.locator(".tree .badge:visible").all()}
    assert {text for text, look in looks.items() if look == ["!", "solid"]} == {
        "cut off from the loss",
        "not in the optimizer",
    }
    listed = [link.inner_text() for link in shown.locator(".suspects a.key").all()]
    assert listed == ["body.spare", "aux", "stop", "head", "distill"]
    assert shown.get_by_role("heading", name="Layers that need a look 3 topmost unused, 2 not learning").is_visible()


def test_bars_are_in_proportion(visit: Visit) -> None:
    """A bar's length is a layer's share of the net."""
    shown = visit(net(layer("small", num_parameters=25), layer("large", num_parameters=75)))
    widths = "e => parseFloat(getComputedStyle(e, '::before').width) / parseFloat(getComputedStyle(e).width)"
    assert [round(bar.evaluate(widths), 2) for bar in shown.locator(".tree .bar").all()] == [1, 0.25, 0.75]


def test_two_thousand_layers_can_be_searched(visit: Visit) -> None:
    """All of them are there, and found."""
    shown = visit(large())
    assert shown.locator(".tree li").count() == 2001
    assert items(shown).count() == 201
    search(shown, "Kind3")
    assert items(shown).count() == 401
    assert shown.get_by_role("status").inner_text() == "200 layers match"


def test_very_deep_layers_are_found(visit: Visit) -> None:
    """Those that stand flat are shown with all their ancestors, too."""
    shown = visit(deep(200))
    search(shown, "Level120")
    assert items(shown).count() == 121
    assert shown.get_by_text("depth 120").is_visible() and not shown.get_by_text("depth 121").is_visible()


def test_without_script(visit: Visit) -> None:
    """The tree opens and closes, and what wouldn't work isn't there."""
    shown = visit(example(), java_script_enabled=False)
    assert not shown.locator("#tools").is_visible()
    inner = shown.locator(".tree .key", has_text="fc")
    assert not inner.is_visible()
    shown.locator(".tree summary", has_text="aux").last.click()
    assert inner.is_visible()
