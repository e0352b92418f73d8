"""A page about a program: one HTML file that needs no network."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Mapping
from html import escape
from pathlib import Path
from typing import Any

_ASSETS = Path(__file__).parent / "assets"
_FRAME_HEIGHT = 720  # pixels, in a notebook
_SCRIPTS = ("base.js", "layout.js", "graph.js", "pictures.js", "kernels.js", "main.js")


def page(contents: Mapping[str, Any]) -> str:
    """The page of what `purevk.report.contents` gives.

    Its policy forbids it to load anything and to run any other script. Names from files are data
    of the script, which makes text nodes of them.
    """
    style = _text("style.css")
    script = "(() => {\n" + '"use strict";\n' + "\n".join(map(_text, _SCRIPTS)) + "})();\n"
    policy = f"default-src 'none'; style-src {_digest(style)}; script-src {_digest(script)}"
    title = f"{contents['model']}: purevk report"
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(_shown(title))}</title>",
            f"<style>{style}</style>",
            "</head>",
            "<body>",
            f"<noscript>{summary_html(title, _summary(contents))}</noscript>",
            f'<script type="application/json" id="data">{_json(contents)}</script>',
            f"<script>{script}</script>",
            "</body>",
            "</html>\n",
        ]
    )


def framed(text: str, title: str, summary: str) -> str:
    """A page for the output of a notebook, in a frame: its style and its scripts do not meet those of
    the notebook. Where frames are left out, such as on GitHub, the summary is what there is.

    Args:
        text: the page.
        title: the line above the frame.
        summary: HTML that a click on this line shows.
    """
    text = text.replace("<head>", '<head>\n<base href="about:srcdoc">', 1)  # its links stay inside
    text = text.replace("&", "&amp;").replace("'", "&#39;")
    return (
        f"<details><summary>{escape(_shown(title))}</summary>{summary}</details>"
        f'<iframe srcdoc=\'{text}\' sandbox="allow-scripts" title="{escape(_shown(title))}"'
        f' width="100%" height="{_FRAME_HEIGHT}" frameborder="0"></iframe>'
    )


def summary_html(title: str, rows: Iterable[tuple[str, str]]) -> str:
    """A heading and a table of names and values, as HTML."""
    cells = "".join(
        f"<tr><th>{escape(_shown(name))}</th><td>{escape(_shown(value))}</td></tr>"
        for name, value in rows
    )
    return f"<div><b>{escape(_shown(title))}</b><table>{cells}</table></div>"


def _summary(contents: Mapping[str, Any]) -> list[tuple[str, str]]:
    rows = [("device", contents["device"]["name"])]
    for method in contents["methods"]:
        nodes = [node for segment in method["graph"]["segments"] for node in segment["nodes"]]
        given = ", ".join(f"{each['name']}: {each['type']}" for each in method["inputs"])
        rows.append((f"method {method['name']}", f"{len(nodes)} nodes, inputs {given}"))
    return [*rows, ("", "the page itself needs JavaScript")]


def _text(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    """The source expression of a policy that allows this text."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _shown(text: str) -> str:
    """Text that can be written as UTF-8, whatever a file gave as a name."""
    return text.encode("utf-8", "replace").decode()


def _json(data: Any) -> str:
    """JSON for the inside of a script element: nothing in it ends the element."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
