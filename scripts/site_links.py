"""A hook of mkdocs: puts files from outside of docs/ into the site, and makes links lead to them.

Pages are written to be read in the repository too, so they link to `../CHANGELOG.md` or
`../deploy/serve.py`. A Markdown file of PAGES becomes a page. Any other file that a page links to is
copied into the site. The page of all error texts is made here: only the site has it.
"""

from __future__ import annotations

import posixpath
import re
import sys
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
ERRORS = "reference/errors.md"
PAGES = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security_policy.md",
    "bench/NOTES.md": "notes.md",
    "bench/RESULTS.md": "results.md",
    "packaging/README.md": "packaging.md",
}
# [text](target#anchor), and the definition of a reference: [text]: target
_LINK = re.compile(r"(\]\(|^\[[^\]^]+\]: )([^)#\s]+)((?:#[^)\s]*)?(?:\)|$))", re.MULTILINE)
_FILE_NAME = re.compile(r"\[[\w./]+\.md\](?=\(([^)#\s:]+))")
_CODE = re.compile(r"^(?:```.*?^```$)|`[^`\n]*`", re.MULTILINE | re.DOTALL)


def source_of(page: str) -> str:
    """The path in the repository of a page of the site."""
    return next((path for path, name in PAGES.items() if name == page), f"docs/{page}")


def name_of(path: str) -> str:
    """The path in the site of a file of the repository."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return PAGES.get(path, f"files/{path}")


def targets(text: str) -> list[str]:
    """The files that a page links to, as it names them."""
    links = [found[2] for found in _LINK.finditer(_CODE.sub("", text))]
    return [link for link in links if ":" not in link]


def _resolved(page: str, target: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), target))


def title_of(path: str) -> str:
    """The first heading of a Markdown file."""
    text = (ROOT / path).read_text(encoding="utf-8")
    return next(line.removeprefix("# ") for line in text.splitlines() if line.startswith("# "))


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages, and the files that pages link to."""
    for path, name in PAGES.items():
        text = (ROOT / path).read_text(encoding="utf-8")
        files.append(File.generated(config, name, content=text))
    written = [each.src_uri for each in files.documentation_pages()]
    sys.path.insert(0, str(ROOT / "scripts"))
    from make_docs import errors_page

    files.append(File.generated(config, ERRORS, content=errors_page()))
    for page in written:
        source = source_of(page)
        for target in targets((ROOT / source).read_text(encoding="utf-8")):
            path = _resolved(source, target)
            name = name_of(path)
            if files.get_file_from_path(name) is None:
                if not (ROOT / path).is_file():
                    raise PluginError(f"{source} links to {target}, which is no file")
                files.append(File.generated(config, name, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Makes the links of a page lead to where the files are in the site. A link whose text is the
    name of a page gets the title of the page."""
    source, folder = source_of(page.file.src_uri), posixpath.dirname(page.file.src_uri)

    def titled(found: re.Match[str]) -> str:
        return f"[{title_of(_resolved(source, found[1]))}]"

    def moved(found: re.Match[str]) -> str:
        if ":" in found[2]:
            return found[0]
        name = name_of(_resolved(source, found[2]))
        return f"{found[1]}{posixpath.relpath(name, folder or '.')}{found[3]}"

    def linked(text: str) -> str:
        return _LINK.sub(moved, _FILE_NAME.sub(titled, text))

    parts, end = [], 0
    for code in _CODE.finditer(markdown):
        parts += [linked(markdown[end : code.start()]), code[0]]
        end = code.end()
    return "".join([*parts, linked(markdown[end:])])
