"""Pictures of every view, from what the program prints and writes: `python docs/images/make.py BUNDLE`.

Terminal views come from the command's own output at 60 and 120 columns, in colour and with letters; pages
from a headless Chromium, light, dark and narrow; figures as the command draws them. The conversation beside
this file is routed twice: by the bundle's router, and by an untrained one that decides per layer (`arrow`),
so that every view has something to show. Pictures go to build/pictures, and with --update two of them here.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.ansi import AnsiDecoder
from rich.console import Group

from molora_cli.app import app
from molora_cli.views.figure_terminal import terminal_png

HERE = Path(__file__).parent
TEXT = f"conversation={HERE / 'conversation.jsonl'}"
VIEWS = ("tokens", "histogram", "heatmap", "position")
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
# Chromium's number of the colour scheme, width, height; "top" is what the documentation shows
PAGES = {
    "light": (1, 1280, 3400), "dark": (0, 1280, 3400), "phone": (1, 500, 3400), "top": (1, 1180, 1010),
}  # fmt: skip


def molora(*arguments: object, **environment: str) -> str:
    """What the command prints on stdout, in this process, for fifty starts would take minutes."""
    before = dict(os.environ)
    os.environ.update(environment)
    try:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            app([str(argument) for argument in arguments], standalone_mode=False)
    finally:
        os.environ.clear()
        os.environ.update(before)
    return printed.getvalue()


def make_traces(bundle: Path, work: Path) -> dict[str, Path]:
    """The conversation through the bundle's router, and through one per layer."""
    layered = work / "per-layer"
    shutil.copytree(bundle, layered)
    molora("attach-router", layered, "--kind", "arrow", "--force")
    traces = {}
    for name, folder in (("router", bundle), ("layers", layered)):
        traces[name] = work / f"{name}.trace"
        molora("inspect", folder, "--data", TEXT, "--save-trace", traces[name], "--json")
    return traces


def draw_terminal(trace: Path, name: str, out: Path) -> None:
    """Every view as a terminal of 60 and of 120 columns shows it, and with letters for colours."""
    for width in (60, 120):
        for view in VIEWS:
            for colours in ("colour", "letters"):
                settings = {"COLUMNS": str(width)}
                if colours == "colour":
                    settings |= {"FORCE_COLOR": "1", "COLORTERM": "truecolor", "TERM": "xterm-256color"}
                text = molora("inspect", trace, "--view", view, **settings)
                picture = terminal_png(Group(*AnsiDecoder().decode(text)), width=width)
                (out / f"terminal-{name}-{view}-{width}-{colours}.png").write_bytes(picture)


def draw_page(trace: Path, name: str, out: Path, *compare: object) -> None:
    """The report, and what Chromium makes of it."""
    page = out / f"report-{name}.html"
    molora("inspect", trace, "--report", page, "--force", "--json", *compare)
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        sys.stderr.write("no Chromium here: the pages are not drawn\n")
        return
    for kind, (scheme, width, height) in PAGES.items():
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
            command = [
                browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
                "--disable-background-networking", "--disable-component-update", "--disable-sync",
                "--hide-scrollbars", f"--user-data-dir={profile}", f"--window-size={width},{height}",
                f"--blink-settings=preferredColorScheme={scheme}",
                f"--screenshot={out / f'report-{name}-{kind}.png'}", page.as_uri(),
            ]  # fmt: skip
            subprocess.run(command, check=True, capture_output=True, timeout=120)


def draw_figures(trace: Path, name: str, out: Path) -> None:
    """Every figure as PNG and SVG."""
    for view in VIEWS:
        for kind in ("png", "svg"):
            file = out / f"figure-{name}-{view}.{kind}"
            molora("inspect", trace, "--view", view, "--figure", file, "--force", "--json")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", type=Path, help="a bundle with a router")
    parser.add_argument("--out", type=Path, default=Path("build/pictures"), help="folder of the pictures")
    parser.add_argument("--update", action="store_true", help="replace the pictures of the documentation too")
    given = parser.parse_args()
    out = given.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as work:
        traces = make_traces(given.bundle, Path(work))
        for name, trace in traces.items():
            draw_terminal(trace, name, out)
            draw_figures(trace, name, out)
            draw_page(trace, name, out)
        draw_page(traces["router"], "compared", out, "--compare", traces["layers"])
    if given.update:
        shutil.copy(out / "figure-router-tokens.svg", HERE / "routing.svg")
        shutil.copy(out / "report-router-top.png", HERE / "report.png")
    sys.stdout.write(f"{len(list(out.iterdir()))} files in {out}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
