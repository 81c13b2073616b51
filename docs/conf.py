"""The site of these pages: `make site` builds it into build/site; a warning, a broken link or anchor fails.

The pages stay plain markdown with relative links, so that a code-hosting page shows them as well. What only
the site needs (its contents) is added here while it is built.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sphinx.application import Sphinx

ROOT = Path(__file__).parents[1]

# caption -> patterns of pages, in the order of the site's contents; a page that is in none fails the build
CONTENTS = {
    "Start": ("quickstart", "your-adapters", "chat", "faq", "limits"),
    "Guides": ("routers", "eval", "python", "kernels", "kernels-*", "bench*"),
    "Reference": ("cli", "settings", "formats", "bundle-format", "log"),
}

project = "molora"
copyright = "molora's authors, Apache-2.0"
extensions = ["myst_parser"]
root_doc = "index"
exclude_patterns = ["benchmarks/*"]
myst_heading_anchors = 4
nitpicky = True
html_theme = "furo"
html_title = "molora"
html_copy_source = False
html_show_sphinx = False


def _version() -> str:
    names: dict[str, str] = {}
    exec((ROOT / "molora_cli" / "_version.py").read_text(encoding="utf-8"), names)
    return names["__version__"]


version = release = _version()


def _add_contents(app: Sphinx, docname: str, source: list[str]) -> None:
    """Append the contents to the index, where a code-hosting page would show a directive as code."""
    if docname != root_doc:
        return
    folder = Path(app.srcdir)
    for caption, patterns in CONTENTS.items():
        listed = "\n".join(page.stem for p in patterns for page in sorted(folder.glob(f"{p}.md")))
        source[0] += f"\n\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{listed}\n```\n"


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("source-read", _add_contents)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
