"""Hooks of `make site`: links out of docs/ become text or pages of the site, and no page is left
out of the navigation.

Pages are written for the repository's own web view, in which `../src/dapo/types.py` is a link that
works. The site has no source files: there such a link becomes its text, after it was checked that
the file exists.
"""

import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import get_plugin_logger
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
LONG_CODE = re.compile(r"(?<=<code>)[\w.]{36,}(?=[=\w./]*</code>)")
LINK = re.compile(r"(!?)\[((?:[^][]|\[[^]]*\])*)\]\(([^)\s]+)\)")
FROM_ROOT = {"changelog.md": "CHANGELOG.md"}
"""Pages that stand outside docs/."""
PAGES = {"README.md": "index.md"} | {path: page for page, path in FROM_ROOT.items()}
log = get_plugin_logger("links")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages from outside docs/, and what the navigation does not name at the end of it."""
    named = set(named_in(config.nav))
    for page in named & FROM_ROOT.keys():
        text = (ROOT / FROM_ROOT[page]).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=text.replace("](docs/", "](")))
    others = sorted(
        file.src_uri for file in files.documentation_pages() if file.src_uri not in named
    )
    if others and config.nav:
        config.nav.append({"More": list(others)})
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Replace each link to a file outside docs/ by its text, or by the page that stands for it."""
    folder = (ROOT / "docs" / page.file.src_uri).parent

    def replaced(link: re.Match[str]) -> str:
        image, text, target = link.groups()
        path, _, anchor = target.partition("#")
        if image or "://" in target or not path.startswith(".."):
            return link[0]
        found = (folder / path).resolve()
        if not found.exists():
            log.warning("%s: %s leads nowhere", page.file.src_uri, target)
        if not found.is_relative_to(ROOT / "docs"):
            name = found.relative_to(ROOT).as_posix()
            elsewhere = PAGES.get(name, page.file.src_uri) != page.file.src_uri
            return f"[{text}]({PAGES[name]}{'#' * bool(anchor)}{anchor})" if elsewhere else text
        return link[0]

    return LINK.sub(replaced, markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Let the long names of options break after a dot, where a table is wider than the page."""
    return LONG_CODE.sub(lambda name: name[0].replace(".", ".<wbr>"), html)


def named_in(nav: Any) -> list[str]:
    """The pages that a navigation names, at any depth."""
    if isinstance(nav, str):
        return [nav]
    return [
        name
        for each in (nav.values() if isinstance(nav, dict) else nav or ())
        for name in named_in(each)
    ]
