"""Pages in a browser: what they show, on any screen, and that names from files stay text."""

from __future__ import annotations

import copy
import itertools
import json
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from purevk.report.contents import contents
from purevk.report.page import framed, page, summary_html
from tests.report.harness import NO_DEVICE, Browser, find_browser, lowered

HOSTILE = "</script><img src=x onerror=alert(1)>\u2028'\"`${alert(2)}<!--\ud800&lt;"
LIMITS = {"bytes_per_second": 1e9, "flops_per_second": 4e9}


def contents_of(name: str = "dynamic_views") -> dict[str, Any]:
    return contents(f"{name}.pte", lowered(name), NO_DEVICE, {})


def many(count: int) -> dict[str, Any]:
    """A page of a method with so many nodes, in layers with branches, every tenth on the CPU."""
    made = contents_of()
    method = made["methods"][0]
    drawing = method["graph"]
    (segment,) = drawing["segments"]
    source = random.Random(1)
    pattern = segment["nodes"][0]
    nodes, edges, segments = [], [], []
    for n in range(count):
        node = copy.deepcopy(pattern)
        node |= {"id": f"n{n}", "path": ["layers", str(n // 12), "ab"[n % 12 // 6]]}
        node["dispatches"][0] |= {"step": n, "seconds": source.random() * 1e-3}
        if n % 10 == 9:
            node |= {"dispatches": [], "why": "no kernel", "bytes": 0, "flops": 0, "seconds": 2e-3}
        nodes.append(node)
        for back in {1, source.choice((1, 2, 5, 40))}:
            if n >= back:
                edges.append(
                    {"from": f"n{n - back}", "to": f"n{n}", "value": "v", "type": "float32[1]"}
                )
    for on, group in itertools.groupby(nodes, lambda node: "cpu" if node["why"] else "gpu"):
        segments.append({"id": f"s{len(segments)}", "on": on, "nodes": list(group)})
    drawing |= {"segments": segments, "edges": edges, "inputs": [], "outputs": []}
    method |= {"timed": True, "whole_call": 0.5}
    made["device"]["limits"] = LIMITS
    return made


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = find_browser()
    if path is None:
        pytest.skip("there is no browser")
    with Browser(path) as made:
        yield made


@pytest.fixture
def show(browser: Browser, tmp_path: Path) -> Callable[..., Browser]:
    """Opens the page of some contents."""

    def opened(made: dict[str, Any], **options: Any) -> Browser:
        path = tmp_path / "page.html"
        path.write_text(page(made), encoding="utf-8")
        browser.open(path, **options)
        return browser

    return opened


def boxes_of(browser: Browser) -> list[dict[str, float]]:
    """Where the boxes of the graph are, in its own coordinates."""
    found: list[dict[str, float]] = browser.run(
        "[...document.querySelectorAll('.node, .end, .module')].map(e => {"
        " const [x, y] = e.getAttribute('transform').match(/-?[\\d.]+/g).map(Number);"
        " const r = e.querySelector('rect:not(.back)');"
        " return {id: e.dataset.id, x, y, w: +r.getAttribute('width'), h: +r.getAttribute('height')}})"
    )
    return found


def check_apart(boxes: list[dict[str, float]]) -> None:
    ordered = sorted(boxes, key=lambda box: box["y"])
    for at, one in enumerate(ordered):
        for other in itertools.takewhile(lambda o: o["y"] < one["y"] + one["h"], ordered[at + 1 :]):
            apart = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
            assert apart, (one, other)


def press(browser: Browser, text: str) -> None:
    """Clicks the button with a text."""
    browser.run(
        f"[...document.querySelectorAll('button')].find(e => e.textContent === {json.dumps(text)}).click()"
    )
    browser.settle()


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [390, 800, 1280])
def test_the_page_fits_every_screen(show: Callable[..., Browser], width: int, dark: bool) -> None:
    browser = show(many(60), width=width, dark=dark)
    assert browser.problems == []
    assert browser.run("document.documentElement.scrollWidth") == width
    light = browser.run(
        "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)[0] > 128"
    )
    assert light is not dark
    sections = browser.run("[...document.querySelectorAll('section')].map(e => e.id)")
    assert sections == ["", "time", "graph", "memory", "kernels", "where", "calls"]
    wide = browser.run(
        "[...document.querySelectorAll('section, .tile, svg, input, nav')].map(e =>"
        " e.getBoundingClientRect()).filter(b => b.right > innerWidth + 0.5 || b.left < -0.5).length"
    )
    assert wide == 0
    browser.run("document.querySelector('#kernels tr.pick').click()")
    browser.settle()
    scrolled = "(e => e.scrollWidth - e.clientWidth)(document.querySelector('#kernels .scroll'))"
    assert browser.run(scrolled) <= 0


@pytest.mark.parametrize("name", ["branch", "dynamic_views", "gather", "linear_relu", "topk"])
def test_the_graph_of_a_file(show: Callable[..., Browser], name: str) -> None:
    made = contents_of(name)
    browser = show(made)
    assert browser.problems == []
    press(browser, "unfold all")
    drawing = made["methods"][0]["graph"]
    nodes = {
        node["id"]
        for segment in drawing["segments"]
        if segment["on"] != "load"
        for node in segment["nodes"]
    }
    ends = {each["id"] for each in (*drawing["inputs"], *drawing["outputs"])}
    found = boxes_of(browser)
    assert {each["id"] for each in found} == nodes | ends
    check_apart(found)
    check_edges(browser, drawing, nodes | ends)


def check_edges(browser: Browser, drawing: dict[str, Any], boxes: set[str]) -> None:
    """There is a line for each pair of boxes that an edge joins, from the one to the other."""
    pairs = {(each["from"], each["to"]) for each in drawing["edges"]}
    pairs = {pair for pair in pairs if set(pair) <= boxes}
    assert browser.run("document.querySelectorAll('.edge').length") == len(pairs)
    around = {each["id"]: each for each in boxes_of(browser)}
    ends = browser.run(
        "[...document.querySelectorAll('.edge')].map(e => e.getAttribute('d').match(/-?[\\d.]+/g).map(Number))"
    )
    lines = {(round(each[0]), round(each[1]), round(each[-2]), round(each[-1])) for each in ends}
    for one, other in (map(around.__getitem__, pair) for pair in pairs):
        start = round(one["x"] + one["w"] / 2), round(one["y"] + one["h"])
        assert (*start, round(other["x"] + other["w"] / 2), round(other["y"])) in lines


def test_a_page_in_a_notebook(browser: Browser, tmp_path: Path) -> None:
    """Styles and scripts of the page and of the notebook do not meet, and links stay inside."""
    made = contents_of()
    made["model"] = HOSTILE
    shown = framed(page(made), f"Program {HOSTILE}", summary_html("summary", [("a", HOSTILE)]))
    path = tmp_path / "notebook.html"
    style = "section, nav { display: none } details { color: rgb(1, 2, 3) }"
    text = f"<!doctype html><meta charset=utf-8><style>{style}</style><body>{shown}<p>next</p>"
    path.write_text(text, encoding="utf-8")
    browser.open(path)
    outside = "getComputedStyle(document.querySelector({!r})).{}"
    assert browser.run(outside.format("details", "color")) == "rgb(1, 2, 3)"
    assert browser.run("document.querySelectorAll('section, img, h1').length") == 0
    assert browser.run("document.querySelector('iframe').contentDocument") is None
    assert browser.run("document.querySelector('iframe').offsetWidth") > 1200
    with browser.in_frame():
        assert browser.run("document.querySelectorAll('section').length") == 7
        assert browser.run(outside.format("nav", "display")) != "none"
        assert browser.run("document.querySelector('h1').textContent") == HOSTILE
        browser.run("document.querySelector('nav a[href=\"#kernels\"]').click()")
        browser.settle()
        assert browser.run("location.href") == "about:srcdoc#kernels"
        assert browser.run("document.querySelectorAll('section').length") == 7
    assert browser.problems == []


def test_load_time_nodes_are_drawn_where_they_are_read(show: Callable[..., Browser]) -> None:
    made = many(60)
    drawing = made["methods"][0]["graph"]
    pattern = drawing["segments"][0]["nodes"][0]
    loads = []
    for n in range(40):
        node = copy.deepcopy(pattern) | {"id": f"w{n}", "path": [], "label": "copy"}
        loads.append(node)
        drawing["edges"].append(
            {"from": f"w{n}", "to": f"n{n % 20 + 20}", "value": "w", "type": "float32[1]"}
        )
    drawing["segments"].insert(0, {"id": "load", "on": "load", "nodes": loads})
    browser = show(made)
    press(browser, "unfold all")
    assert len(boxes_of(browser)) == 60
    browser.click(".switch input")
    press(browser, "unfold all")
    found = boxes_of(browser)
    assert len(found) == 100
    check_apart(found)
    check_edges(browser, drawing, {each["id"] for each in found})
    assert browser.problems == []


def test_a_thousand_nodes(show: Callable[..., Browser]) -> None:
    browser = show(many(1000))
    folded = boxes_of(browser)
    assert len(folded) < 100
    check_apart(folded)
    taken = browser.run(
        "(() => { const start = performance.now();"
        " [...document.querySelectorAll('button')].find(e => e.textContent === 'unfold all').click();"
        " return performance.now() - start; })()"
    )
    assert taken < 10_000  # milliseconds; some 200 on an idle machine
    found = boxes_of(browser)
    assert len(found) == 1000
    check_apart(found)
    inside = browser.run(
        "[...document.querySelectorAll('.open')].map(e => {"
        " const [x, y] = e.getAttribute('transform').match(/-?[\\d.]+/g).map(Number);"
        " const r = e.querySelector('rect');"
        " return {x, y, w: +r.getAttribute('width'), h: +r.getAttribute('height')}})"
    )
    layers = 1000 // 12 + 1
    # All of them, each layer, and its halves; the last layer has one half and is drawn as this.
    assert len(inside) == 1 + layers + 2 * (layers - 1)
    for box in found:
        around = [
            each
            for each in inside
            if each["x"] <= box["x"] and box["x"] + box["w"] <= each["x"] + each["w"]
            and each["y"] <= box["y"] and box["y"] + box["h"] <= each["y"] + each["h"]
        ]  # fmt: skip
        assert len(around) >= 2
    press(browser, "fold all")
    assert len(boxes_of(browser)) == 1
    assert browser.problems == []


def test_search_selects_and_unfolds(show: Callable[..., Browser]) -> None:
    made = many(300)
    for segment in made["methods"][0]["graph"]["segments"]:
        for node in segment["nodes"]:
            if node["id"] == "n287":
                node |= {"label": "a needle", "line": "model.py:12, in forward"}
    browser = show(made)
    press(browser, "fold all")
    browser.click(".search input")
    browser.type("needle MODEL.py:12")
    assert browser.run("document.querySelector('.found').innerText").startswith("1 hit\n")
    browser.click(".found button")
    box = browser.run(
        "(e => { const b = e.getBoundingClientRect(), f = document.querySelector('.frame').getBoundingClientRect();"
        " return b.left > f.left && b.right < f.right && b.top > f.top && b.bottom < f.bottom; })"
        "(document.querySelector('.node.selected[data-id=n287]'))"
    )
    assert box is True
    panel = browser.run("document.querySelector('.panel').innerText")
    assert panel.startswith("a needle") and "layers.23.b" in panel
    assert "model.py:12, in forward" in panel
    browser.click(".search input")
    browser.type(" nothing like it")
    assert browser.run("document.querySelector('.found').innerText") == "nothing found"


def test_a_kernel_shows_its_glsl(show: Callable[..., Browser]) -> None:
    made = contents_of("linear_relu")
    browser = show(made)
    press(browser, "unfold all")
    browser.click(".node")
    browser.click(".panel .dispatch .link")
    (dispatch,) = [
        each
        for segment in made["methods"][0]["graph"]["segments"]
        if segment["on"] == "gpu"
        for node in segment["nodes"]
        for each in node["dispatches"]
    ]
    kernel = made["kernels"][dispatch["kernel"]]
    macros = sorted(f"#define {name} {value}" for name, value in kernel["macros"])
    shown = browser.run("document.querySelector('.code').textContent")
    assert sorted(shown.splitlines()) == macros
    press(browser, f"{kernel['template']} (template)")
    template = made["files"][kernel["template"]]
    assert browser.run("document.querySelector('.code').textContent") == template
    for name, key in kernel["files"][1:]:
        press(browser, name)
        assert browser.run("document.querySelector('.code').textContent") == made["files"][key]
    assert browser.problems == []


def test_each_dispatch_of_a_node_is_a_part_of_the_bar(show: Callable[..., Browser]) -> None:
    made = contents_of("linear_relu")
    (node,) = [
        node
        for segment in made["methods"][0]["graph"]["segments"]
        if segment["on"] == "gpu"
        for node in segment["nodes"]
    ]
    one = node["dispatches"][0]
    kernel = copy.deepcopy(made["kernels"][one["kernel"]]) | {"template": "elementwise/copy.comp"}
    other = copy.deepcopy(one) | {"kernel": len(made["kernels"])}
    made["kernels"].append(kernel)
    one["bytes"], other["bytes"], node["bytes"] = 3000, 1000, 4000
    node["dispatches"].append(other)
    browser = show(made)
    colours = "[...document.querySelectorAll('%s')].map(e => e.style.background)"
    parts = browser.run(colours % "#time .strip i")
    assert len(parts) == 2 and set(parts) == set(browser.run(colours % "#time .legend i"))
    widths = browser.run(
        "[...document.querySelectorAll('#time .strip i')].map(e => e.getBoundingClientRect().width)"
    )
    assert widths[0] == pytest.approx(3 * widths[1], rel=0.02)
    assert browser.problems == []


def test_where_nodes_run_and_why(show: Callable[..., Browser]) -> None:
    browser = show(many(30))
    text = browser.run("document.getElementById('where').innerText")
    assert "on the CPU" in text and "no kernel" in text
    assert browser.run("document.querySelector('.tile.warn b').innerText") == "3 nodes"
    assert browser.run("document.querySelectorAll('.node.on-cpu').length") == 3
    times = browser.run("document.getElementById('time').innerText")
    assert "on the CPU" in times and "2 ms" in times  # each of the three
    assert "operators on the CPU 6 ms" in browser.run("document.querySelector('.tile').innerText")
    press(browser, "fold all")
    assert browser.run("document.querySelectorAll('.module.on-cpu').length") == 1


def test_memory_shows_each_tensor(show: Callable[..., Browser]) -> None:
    made = contents_of("topk")
    blocks = made["methods"][0]["memory"]["blocks"]
    browser = show(made)
    assert browser.run("document.querySelectorAll('.block').length") == len(blocks) == 2
    heights = browser.run(
        "[...document.querySelectorAll('.block rect')].map(e => +e.getAttribute('height') + 1)"
    )
    ratio = blocks[0]["bytes"] / blocks[1]["bytes"]
    assert heights[0] / heights[1] == pytest.approx(ratio, rel=0.02)
    browser.click(".block")
    assert browser.run("document.querySelectorAll('.node.selected').length") == 1


def test_a_method_can_be_chosen(show: Callable[..., Browser]) -> None:
    made = contents_of("two_methods")
    browser = show(made)
    names = [each["name"] for each in made["methods"]]
    assert browser.run("[...document.querySelectorAll('option')].map(e => e.innerText)") == names
    for number, method in enumerate(made["methods"]):
        browser.run(
            f"(e => {{ e.selectedIndex = {number}; e.dispatchEvent(new Event('change')); }})"
            "(document.querySelector('select'))"
        )
        browser.settle()
        press(browser, "unfold all")
        nodes = sum(
            len(each["nodes"]) for each in method["graph"]["segments"] if each["on"] != "load"
        )
        assert browser.run("document.querySelectorAll('.node').length") == nodes
    assert browser.problems == []


def hostile(value: Any) -> Any:
    """The data with every text changed that may come from a file."""
    if isinstance(value, dict):
        return {
            key: f"{each}{HOSTILE}"
            if isinstance(each, str) and key not in ("id", "on", "from", "to", "template")
            else hostile(each)
            for key, each in value.items()
        }
    if isinstance(value, list):
        return [f"{each}{HOSTILE}" if isinstance(each, str) else hostile(each) for each in value]
    return value


@pytest.mark.parametrize("name, width", [("two_methods", 390), ("topk", 1280)])
def test_hostile_names_stay_text(show: Callable[..., Browser], name: str, width: int) -> None:
    made = contents_of(name)
    files, kernels = made["files"], made["kernels"]
    changed = hostile(made) | {"files": files, "kernels": kernels}
    for kernel in changed["kernels"]:
        kernel["macros"] = [[HOSTILE, HOSTILE]]
    for method in changed["methods"]:
        for check in ("guards", "checks"):
            method[check].append({"text": HOSTILE, "words": HOSTILE})
        for segment in method["graph"]["segments"]:
            for node in segment["nodes"]:
                node["path"] = [HOSTILE, "__proto__", HOSTILE]
    browser = show(changed, width=width)
    press(browser, "unfold all")
    browser.click(".node")
    browser.run("document.querySelector('#kernels tr.pick').click()")
    browser.run("document.querySelectorAll('details').forEach(e => { e.open = true })")
    browser.settle()
    assert browser.problems == []
    wide = browser.run(
        "[...document.querySelectorAll('body *')].filter(e => e.getBoundingClientRect().right > innerWidth + 1"
        " && !e.closest('.scroll, .frame, .outline, .code, nav')).map(e => e.outerHTML.slice(0, 90))"
    )
    assert wide == []
    assert browser.run("document.documentElement.scrollWidth") == width
    assert browser.run("document.querySelectorAll('img, iframe, body script, object').length") == 0
    shown = HOSTILE.replace("\ud800", "\ufffd")[:24]
    assert shown in browser.run("document.querySelector('h1').textContent")
    assert shown in browser.run("document.querySelector('.panel').textContent")
    assert shown in browser.run("document.querySelector('.code').textContent")
    assert shown in browser.run("document.getElementById('calls').textContent")


def test_no_other_script_may_run(show: Callable[..., Browser]) -> None:
    browser = show(contents_of())
    browser.run(
        "(() => { const e = document.createElement('script'); e.textContent = 'window.ran = 1';"
        " document.body.append(e); const i = new Image(); i.src = 'https://example.invalid/x.png'; })()"
    )
    browser.settle()
    assert browser.run("window.ran === undefined") is True
    assert len(browser.problems) >= 2
    assert all("Content Security Policy" in each for each in browser.problems), browser.problems


def test_nothing_ends_the_data() -> None:
    text = page(hostile(contents_of()))
    assert len(re.findall(r"(?i)<\s*/\s*script", text)) == 2
    assert "<img" not in text and "<!--" not in text
    text.encode("utf-8")


def test_a_summary_is_escaped() -> None:
    text = summary_html(HOSTILE, [(HOSTILE, HOSTILE)])
    assert "<img" not in text and "</script" not in text
    assert text.count("&lt;/script&gt;") == 3
    text.encode("utf-8")


def test_the_mouse_moves_and_zooms_the_graph(show: Callable[..., Browser]) -> None:
    browser = show(many(40))
    browser.run("document.querySelector('.frame').scrollIntoView({block: 'center'})")
    browser.settle()

    def seen() -> list[float]:
        found: list[float] = browser.run(
            "document.querySelector('.canvas > g').getAttribute('transform').match(/-?[\\d.]+/g).map(Number)"
        )
        return found

    x, y = browser.run(
        "(b => [b.x + b.width / 2, b.y + 30])(document.querySelector('.node').getBoundingClientRect())"
    )
    scale, left, top = seen()
    browser.mouse("mousePressed", x, y)
    browser.mouse("mouseMoved", x + 20, y + 10)
    browser.mouse("mouseMoved", x + 60, y + 40)
    browser.mouse("mouseReleased", x + 60, y + 40)
    browser.settle()
    assert seen() == pytest.approx([scale, left + 60 / scale, top + 40 / scale])
    assert browser.run("document.querySelectorAll('.node.selected').length") == 0
    browser.mouse("mouseWheel", x, y, deltaX=0, deltaY=-100, modifiers=2)  # with Ctrl
    browser.settle()
    assert seen()[0] > scale * 1.2
    browser.mouse("mouseWheel", x, y, deltaX=0, deltaY=100)
    browser.settle()
    assert seen()[0] > scale * 1.2
    assert browser.problems == []


def test_the_graph_fills_the_window(show: Callable[..., Browser]) -> None:
    browser = show(many(40), width=390, height=800)

    def size() -> list[float]:
        found: list[float] = browser.run(
            "(b => [b.width, b.height])(document.querySelector('.split').getBoundingClientRect())"
        )
        return found

    before = size()
    browser.click(".zoom button:last-child")
    assert size() == [390, 800]
    browser.click(".node")
    assert browser.run("document.querySelector('.panel h3').getBoundingClientRect().top") < 800
    browser.run("dispatchEvent(new KeyboardEvent('keydown', {key: 'Escape'}))")
    assert size()[0] == before[0] < 390
    assert browser.problems == []
