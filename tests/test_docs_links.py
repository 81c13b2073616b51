"""Every link of the README and the pages leads to a file and, where it names one, to a heading of it."""

from __future__ import annotations

import re
from functools import cache
from itertools import pairwise
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@cache
def tokens(page: Path) -> list[Token]:
    return MarkdownIt("commonmark").enable("table").parse(page.read_text(encoding="utf-8"))


@cache
def anchors(page: Path) -> set[str]:
    """The anchors that code-hosting pages and the site give to a page's headings."""
    found: set[str] = set()
    parsed = tokens(page)
    for opening, inline in pairwise(parsed):
        if opening.type != "heading_open":
            continue
        text = "".join(child.content for child in inline.children or [])
        slug = re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-")
        number = sum(1 for known in found if re.fullmatch(re.escape(slug) + r"(-\d+)?", known))
        found.add(f"{slug}-{number}" if slug in found else slug)
    return found


def links(page: Path) -> list[str]:
    children = [child for token in tokens(page) for child in token.children or []]
    targets = [child.attrGet("href") or child.attrGet("src") for child in children]
    return [str(target) for target in targets if target]


def problem(page: Path, link: str) -> str | None:
    parts = urlsplit(link)
    if parts.scheme:
        return None if parts.scheme == "https" else "not https"
    target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
    if not target.is_relative_to(ROOT):
        return "leads outside the repository"
    if not target.exists():
        return "no such file"
    if target.is_dir():
        return "a folder, which the site cannot show: name a file"
    if parts.fragment and (target.suffix != ".md" or parts.fragment not in anchors(target)):
        return "no such heading"
    return None


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path) -> None:
    found = {link: problem(page, link) for link in links(page)}
    assert {link: why for link, why in found.items() if why} == {}


def test_every_page_can_be_reached_from_the_index() -> None:
    index = ROOT / "docs" / "index.md"
    seen, waiting = {index}, [index]
    while waiting:
        page = waiting.pop()
        for link in links(page):
            target = (page.parent / urlsplit(link).path).resolve()
            if target.suffix == ".md" and target in PAGES and target not in seen:
                seen.add(target)
                waiting.append(target)
    assert {page.name for page in PAGES} - {page.name for page in seen} <= {"README.md"}


def test_what_a_broken_link_looks_like() -> None:
    """The checks above can fail: each kind of broken link is found."""
    page = ROOT / "docs" / "index.md"
    assert problem(page, "nowhere.md") == "no such file"
    assert problem(page, "limits.md#nowhere") == "no such heading"
    assert problem(page, "../../x.md") == "leads outside the repository"
    assert problem(page, "http://example.org") == "not https"
    assert problem(page, "../recipes") == "a folder, which the site cannot show: name a file"
    assert problem(page, "limits.md#limits-said-plainly") is None


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("sphinx", reason="pip install 'molora[docs]'")
    pytest.importorskip("myst_parser")
    pytest.importorskip("furo")
    from sphinx.cmd.build import build_main

    site = tmp_path / "site"
    options = ["-W", "--keep-going", "-q", "-d", str(tmp_path / "trees")]
    assert build_main([*options, str(ROOT / "docs"), str(site)]) == 0
    for page in site.glob("*.html"):
        loaded = re.findall(r"<(?:script|link|img)[^>]+?(?:src|href)=\"(https?:[^\"]+)", page.read_text())
        assert not loaded, f"{page.name} needs the network"
