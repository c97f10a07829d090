"""The documentation site is built without a warning, loads nothing from another host, and leaves no
page out.
"""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import dapo
from helpers.paths import ROOT

mkdocs_build = pytest.importorskip(
    "mkdocs.commands.build", reason="mkdocs is not installed (extra docs)"
)
from mkdocs.config import load_config  # noqa: E402
from mkdocs.exceptions import Abort  # noqa: E402

from docs import site_hooks  # noqa: E402

DOCS = ROOT / "docs"


def built(into: Path, **changes: Any) -> Path:
    """The folder of the pages that mkdocs.yml describes."""
    mkdocs_build.build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(into), **changes))
    return into


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The whole site; a warning of mkdocs would be an error."""
    return built(tmp_path_factory.mktemp("site"))


def text_of(page: Path) -> str:
    return re.sub(r"<[^>]*>", "", page.read_text(encoding="utf-8"))


def test_every_page_of_docs_is_on_the_site_and_linked_from_another(site: Path):
    pages = {page.relative_to(DOCS).with_suffix(".html").as_posix() for page in DOCS.rglob("*.md")}
    assert len(pages) > 20
    assert [name for name in sorted(pages) if not (site / name).is_file()] == []
    assert pages - all_links(site) == set()


def all_links(site: Path) -> set[str]:
    """What any page links to, from the top of the site."""
    found = set()
    for page in site.rglob("*.html"):
        for target in re.findall(r'href="([^"#:/][^"#:]*\.html)', page.read_text(encoding="utf-8")):
            found.add((page.parent / target).resolve().relative_to(site.resolve()).as_posix())
    return found


def test_every_link_and_picture_leads_to_a_file_of_the_site(site: Path):
    for page in site.rglob("*.html"):
        if page.name == "404.html":
            continue  # it is served for any address
        for target in re.findall(r'(?:href|src)="([^"#?]+)', page.read_text(encoding="utf-8")):
            if "://" not in target and not target.startswith(("mailto:", "data:")):
                assert (page.parent / target).exists(), f"{page.relative_to(site)}: {target}"


def test_nothing_is_loaded_from_another_host(site: Path):
    for page in site.rglob("*.html"):
        html = page.read_text(encoding="utf-8")
        loaded = re.findall(r"<(?:script|img|iframe|source)[^>]*?\bsrc=[\"']?([^\"'\s>]+)", html)
        loaded += re.findall(r"<link[^>]*?\bhref=[\"']?([^\"'\s>]+)", html)
        assert [address for address in loaded if re.match(r"(https?:)?//", address)] == []
    for sheet in site.rglob("*.css"):
        assert (
            re.findall(
                r"(?:url\(|@import )[\"']?(?:https?:)?//[^)]*", sheet.read_text(encoding="utf-8")
            )
            == []
        )


def test_the_search_knows_the_options_and_the_functions_of_the_reference(site: Path):
    entries = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))[
        "docs"
    ]
    found = " ".join(entry["title"] + " " + entry["text"] for entry in entries)
    for word in (
        "loss.clip_high",
        "group_advantages",
        "get_verifier",
        "is_informative",
        "dapo fork",
    ):
        assert word in found
    assert len({entry["location"].partition("#")[0] for entry in entries}) >= len(
        list(DOCS.rglob("*.md"))
    )


def test_the_reference_has_every_name_that_import_dapo_gives(site: Path):
    page = (site / "api" / "reference.html").read_text(encoding="utf-8")
    anchors = set(re.findall(r'id="dapo\.[\w.]*?(\w+)"', page))
    assert {name for name in dapo.__all__ if not name.startswith("_")} <= anchors


def test_the_reference_shows_signatures_and_what_docstrings_say(site: Path):
    reference = text_of(site / "api" / "reference.html")
    assert "The reference answer as text, which the verifier parses." in reference
    for name in ("Problem", "Verdict", "Group", "Sample", "Generation", "GenerationRequest"):
        assert re.search(rf"\b{name}\b", reference)
    assert "clip_high" in reference
    assert "Eq. 13" in reference


@pytest.mark.parametrize(
    "page",
    [
        "[gone](nowhere.md)",
        "[gone](../nowhere.md)",
        "[gone](index.md#nowhere)",
        "![gone](nowhere.png)",
    ],
)
def test_a_dead_link_ends_the_build(page: str, tmp_path: Path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text("# One page\n\nIt is [alive](index.md#one-page).\n")
    small: dict[str, Any] = {"docs_dir": str(tmp_path / "docs"), "nav": [{"Start": "index.md"}]}
    small |= {"plugins": [], "extra_css": [], "theme": {"name": "mkdocs"}}
    assert built(tmp_path / "good", **small).is_dir()
    (tmp_path / "docs" / "index.md").write_text(f"# One page\n\n{page}\n")
    with pytest.raises(Abort):
        built(tmp_path / "bad", **small)


def test_links_out_of_docs_become_text_or_the_page_that_stands_for_them():
    def shown(text: str, *, on: str = "data.md") -> str:
        return site_hooks.on_page_markdown(text, SimpleNamespace(file=SimpleNamespace(src_uri=on)))

    assert (
        shown("see [`types`](../src/dapo/types.py) and [data](data.md#x)")
        == "see `types` and [data](data.md#x)"
    )
    assert shown("the [README](../README.md)") == "the [README](index.md)"
    assert shown("the [README](../README.md)", on="index.md") == "the README"
    assert shown("[changes](../CHANGELOG.md#010)") == "[changes](changelog.md#010)"
    assert (
        shown("[out](https://example.org/../x) ![p](quickstart.png)")
        == "[out](https://example.org/../x) ![p](quickstart.png)"
    )
    assert shown("[the paper](../paper.md)", on="api/reference.md") == "[the paper](../paper.md)"
