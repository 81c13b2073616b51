"""Views of a trace at every width, with every kind of colour, and with hostile text."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.cells import cell_len
from rich.console import Console

from molora_cli.core.agreement import agreement
from molora_cli.core.counting import summarise
from molora_cli.core.trace import Trace
from molora_cli.errors import InputError
from molora_cli.views.coloured import ColouredDocuments
from molora_cli.views.figure import check_figure, tokens_svg, write_figure
from molora_cli.views.heatmap import Heatmap
from molora_cli.views.histogram import Histogram
from molora_cli.views.palette import BASE, HUES, Palette, ink, rgb, tint
from molora_cli.views.position import Positions, place, split_cells
from molora_cli.views.tables import AdapterView, BundleView, StatsView
from molora_cli.views.trace import TraceView

PIECES = [
    "Solve",
    " the",
    " integral",
    " 日本語",
    "\n",
    "\n\n",
    " \udce6",
    "\udc97\udca5",
    "👩‍💻",
    "\x1b[31m",
    "\u202e",
]
PIECES += ["</script>", "[bold]x[/bold]", "\t", "\x00", "ﷺ"]
ESCAPES = re.compile(r"\x1b\[[0-9;]*m")


def _trace(adapters: int = 4, n: int = 120, groups: int = 1, k: int = 1, base: bool = True) -> Trace:
    rng = np.random.default_rng(0)
    names = tuple(["math", "code", "sql", "medical"][:adapters]) + tuple(
        f"adapter-{i}" for i in range(adapters - 4)
    )
    experts = (*names, "__base__") if base else names
    indices = rng.integers(-1 if base else 0, adapters, (n, groups, k)).astype(np.int16)
    return Trace(
        token_ids=np.arange(n) % len(PIECES),
        starts=np.array([0, n // 3, n // 2]),
        indices=indices,
        gates=np.sort(rng.dirichlet(np.ones(k), (n, groups)))[..., ::-1].astype(np.float32),
        adapters=names,
        scores=np.log(rng.dirichlet(np.ones(len(experts)), (n, groups))).astype(np.float32),
        experts=experts,
        domains=("math", "日本語の医学", None),
        pieces=dict(enumerate(PIECES)),
        meta={"groups": [[3 * g, 3 * g + 3] for g in range(groups)]},
    )


def _views(trace: Trace) -> list[Any]:
    stats = summarise(trace)
    parts = [Heatmap(trace, stats), Positions(trace, stats)]
    return [ColouredDocuments(trace, limit=100), Histogram(trace, stats), StatsView(trace, stats), *parts]


def _render(view: Any, width: int, **settings: Any) -> str:
    file = io.StringIO()
    console = Console(file=file, width=width, highlight=False, _environ={}, **settings)
    console.print(view)
    return file.getvalue()


COLOURS: dict[str, dict[str, Any]] = {
    "none": {},
    "16": {"force_terminal": True, "color_system": "standard"},
    "256": {"force_terminal": True, "color_system": "256"},
    "truecolor": {"force_terminal": True, "color_system": "truecolor"},
    "NO_COLOR": {"force_terminal": True, "color_system": "truecolor", "no_color": True},
}


@pytest.mark.parametrize("width", [40, 47, 60, 80, 120, 200])
@pytest.mark.parametrize("colours", list(COLOURS))
def test_no_line_passes_the_width_and_nothing_raw_escapes(width: int, colours: str) -> None:
    chat = _trace()
    chat.content = np.arange(120) % 4 != 0
    for trace in (_trace(), _trace(adapters=20, k=2, groups=3), _trace(adapters=1, base=False), chat):
        for view in _views(trace):
            text = ESCAPES.sub("", _render(view, width, **COLOURS[colours]))
            assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f\u202e\ud800-\udfff]", text)
            for line in text.split("\n"):
                assert cell_len(line) <= width, line


def test_no_colour_means_no_escape_and_letters_instead() -> None:
    text = _render(ColouredDocuments(_trace(), limit=100), 80)
    assert "\x1b" not in text and re.search(r"\b[mcse-]·", text)
    assert "\\x1b[31m" in text and "[bold]x[/bold]" in text
    coloured = _render(ColouredDocuments(_trace(), limit=100), 80, **COLOURS["truecolor"])
    assert "\x1b[" in coloured and "m·" not in ESCAPES.sub("", coloured)
    # bold and dim may stay, a colour may not
    bare = _render(ColouredDocuments(_trace(), limit=100), 80, **COLOURS["NO_COLOR"])
    assert not re.search(r"\x1b\[[0-9;]*(3[0-7]|38|4[0-7]|48)[;m]", bare)


def test_split_characters_are_shown_whole() -> None:
    trace = _trace(n=2)
    trace.token_ids = np.array([6, 7])
    trace.starts, trace.domains = np.array([0]), ()
    text = _render(ColouredDocuments(trace, limit=9), 80)
    assert text.count("日") == 1 and "\ufffd" not in text
    # cut within the character: one mark that something is missing, and no crash
    assert "\ufffd" in _render(ColouredDocuments(trace, limit=1), 80)


def test_each_domain_is_shown_when_the_text_is_cut() -> None:
    text = _render(ColouredDocuments(_trace(), limit=30), 80)
    assert "math, text 1" in text and "日本語の医学, text 2" in text and "text 3" in text
    assert "30 of 120 tokens are shown; the statistics cover all" in text
    assert "are shown" not in _render(ColouredDocuments(_trace(), limit=1000), 80)


def test_legend_names_letters_and_shares() -> None:
    palette = Palette(["math", "medical", "m"], Console(file=io.StringIO()))
    assert [palette.glyph(i) for i in (0, 1, 2, BASE)] == ["m", "e", "a", "-"]
    legend = palette.legend({0: 0.25, BASE: 0.75}).plain
    assert legend == "m math 25 %  e medical 0 %  a m 0 %  - base 75 %"
    assert palette.legend(width=12).plain == "m math\ne medical\na m  - base"
    assert "base" not in palette.legend(base=False).plain


def test_the_template_is_dim_and_said_to_be_left_out() -> None:
    trace = _trace()
    trace.content = np.arange(120) % 4 != 0
    text = _render(Histogram(trace, summarise(trace)), 100)
    assert "template tokens, 30, are left out; --template counts them" in text and "90 tokens" in text
    whole = summarise(trace, template=True)
    text = _render(Histogram(trace, whole), 100)
    assert "the chat template's 30 tokens are counted too" in text and "120 tokens" in text
    views = [ColouredDocuments(trace, limit=60), ColouredDocuments(trace, limit=60, template=True)]
    assert "60 of 120 tokens are shown; the statistics cover all messages" in _render(views[0], 100)
    dim, full = (_render(v, 100, **COLOURS["truecolor"]) for v in views)
    assert "dim: the chat template" in dim and "dim: the chat template" not in full
    assert re.search(r"\x1b\[2;38[0-9;]*mSolve", dim) and not re.search(r"\x1b\[2;38[0-9;]*mSolve", full)
    # the legend's shares are those of the histogram
    legend = summarise(trace).groups[0].total.share
    assert f"math {100 * legend[0]:.0f} %" in _render(views[0], 100)
    assert f"math {100 * whole.groups[0].total.share[0]:.0f} %" in _render(views[1], 100)


def test_letters_are_unique_for_many_adapters() -> None:
    palette = Palette([f"math{i}" for i in range(200)])
    assert len({palette.glyph(i) for i in range(-1, 200)}) == 201


def test_first_adapters_differ_in_hue_and_later_ones_in_marks() -> None:
    palette = Palette([str(i) for i in range(28)])
    assert len({str(palette.style(i)) for i in range(28)}) == 28
    assert len({palette.style(i).bgcolor for i in range(7)}) == 7
    assert palette.style(7).underline and not palette.style(6).underline
    assert not palette.style(BASE)


def _contrast(a: str, b: str) -> float:
    def luminance(colour: str) -> float:
        linear = [
            c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4
            for c in (v / 255 for v in rgb(colour))
        ]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("strength", [0.0, 0.25, 0.5, 0.75, 1.0])
def test_text_on_every_tint_is_readable(strength: float) -> None:
    for hue in HUES:
        background = tint(hue, strength)
        assert _contrast(background, ink(background)) >= 4.5, (hue, strength)


def test_hues_stay_apart_without_red_or_green_cones() -> None:
    """Machado, Oliveira and Fernandes 2009, severity 1, on linear RGB: no two hues fall together."""
    protan = np.array([[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]])
    deutan = np.array([[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]])
    colours = np.array([rgb(h) for h in HUES]) / 255
    linear = np.where(colours <= 0.04045, colours / 12.92, ((colours + 0.055) / 1.055) ** 2.4)
    for seen in (np.eye(3), protan, deutan):
        shown = np.clip(linear @ seen.T, 0, 1) ** (1 / 2.2)
        distances = [np.linalg.norm(a - b) for i, a in enumerate(shown) for b in shown[:i]]
        assert min(distances) > 0.12


def test_histogram_bars_and_uniform_line() -> None:
    trace = _trace(n=100)
    trace.starts, trace.domains = np.array([0]), ()
    trace.indices[:] = 0
    trace.indices[:50] = 1
    text = _render(Histogram(trace, summarise(trace)), 100)
    bars = {line.split()[1]: line for line in text.split("\n") if line.startswith("  ") and "%" in line}
    assert "1 of 5: 20 %" in text and "100 tokens, 1 text" in text
    assert bars["math"].rstrip().endswith("50 %") and bars["sql"].rstrip().endswith("0 %")
    assert {line.index("│") for line in bars.values()} == {next(iter(bars.values())).index("│")}
    room = 100 - 3 - len("e medical") - 7
    # letters of the bar and the one under the uniform line, less the two of the label "m math"
    assert bars["math"].count("m") + 1 - 2 == pytest.approx(room / 2, abs=1)


def test_heatmap_shows_every_layer_in_percent_or_in_tenths() -> None:
    trace = _trace(groups=5)
    trace.indices[:, 3] = 1
    text = _render(Heatmap(trace, summarise(trace)), 80)
    rows = [line.split() for line in text.split("\n")]
    # a block for all text and one per domain, a row per group
    assert [row[0] for row in rows if row and re.fullmatch(r"\d+-\d+", row[0])] == [
        f"{3 * g}-{3 * g + 2}" for g in range(5)
    ] * 4
    assert ["9-11", "0", "100", "0", "0", "0"] in rows and "all text  120 tokens, 3 texts" in text
    assert ["layers", "m", "c", "s", "e", "-"] in rows and "m math  c code" in text and "in percent" in text
    many = _trace(groups=2, adapters=12)
    many.indices[:] = 0
    narrow = _render(Heatmap(many, summarise(many)), 40)
    assert "in tenths (X all, . less than half of one)" in " ".join(narrow.split())
    assert re.search(r"^0-2    X *$", narrow, re.MULTILINE) and "layers mcsea" in narrow


def test_heatmap_of_one_group_has_a_row_per_domain() -> None:
    text = _render(Heatmap(_trace(), summarise(_trace())), 60)
    assert "one route holds for all layers" in text
    assert [line.split()[0] for line in text.split("\n")[3:7]] == ["math", "日本語の医学", "other", "all"]


def test_positions_are_bars_of_the_whole_width() -> None:
    trace = _trace(n=64, base=False)
    trace.starts, trace.domains = np.array([0]), ()
    trace.indices[:] = 0
    trace.indices[32:] = 1
    lines = _render(Positions(trace, summarise(trace)), 90).split("\n")
    bars = dict(line.split(maxsplit=1) for line in lines[1:8])
    assert list(bars) == ["1", "2-3", "4-7", "8-15", "16-31", "32-63", "64-127"]
    assert set(bars["8-15"].split()[0]) == {"m"} and bars["8-15"].split()[1] == "8"
    assert bars["32-63"].split()[0].count("m") == pytest.approx(len(bars["32-63"].split()[0]) / 32, abs=1)
    assert len({len(line) for line in lines[1:8]}) == 1
    assert place(0) == "1" and place(10) == "1,024-2,047"
    assert split_cells([0.5, 0.25, 0.25], 5) in ([3, 1, 1], [2, 2, 1], [2, 1, 2])
    assert sum(split_cells([0.34, 0.33, 0.33], 7)) == 7 and split_cells([0.0, 0.0], 9) == [0, 0]


def test_of_many_groups_the_ends_and_the_middle_are_shown_and_it_is_said() -> None:
    trace = _trace(groups=12)
    stats = summarise(trace)
    for view in (ColouredDocuments(trace, limit=50), Histogram(trace, stats), Positions(trace, stats)):
        text = _render(view, 100)
        assert "3 of 12 groups of layers are shown; all of them: --view heatmap" in text
        assert "layers 0-2" in text and "layers 18-20" in text and "layers 33-35" in text
        assert "layers 3-5" not in text


def test_the_views_that_are_asked_for() -> None:
    trace = _trace(groups=2)
    stats = summarise(trace)
    for view, sign in (("heatmap", "in percent"), ("position", "by place"), ("histogram", "uniform")):
        text = _render(TraceView(trace, stats, view=view, tokens=None, limit=50), 100)
        assert sign in text and "switches" not in text and "text 1 (" not in text
    text = _render(TraceView(trace, stats, view="tokens", tokens=None, limit=50), 100)
    assert "text 1 (" in text and "uniform" not in text
    text = _render(TraceView(trace, stats, tokens=None, limit=50), 100)
    assert "text 1 (" in text and "in percent" in text and "switches" in text
    assert "in percent" not in _render(TraceView(_trace(), stats, tokens=False, limit=50), 100)
    compared = TraceView(trace, stats, tokens=False, limit=50)
    compared.compare(agreement(trace, trace), ("one\x1b", "two"))
    text = _render(compared, 100)
    assert (
        "100.0 % of 120 tokens take an expert of the same name" in text
        and "rows one\\x1b, columns two" in text
    )
    compared.compare(None, ("one", "two"))
    assert "two holds other text" in _render(compared, 100)


def test_ascii_terminals_get_ascii() -> None:
    class Ascii(io.StringIO):
        encoding = "ascii"

    for view in [Histogram(_trace(), summarise(_trace()))]:
        file = Ascii()
        Console(file=file, width=60, _environ={}).print(view)
        line = next(x for x in file.getvalue().split("\n") if "math" in x and "%" in x)
        assert line.isascii() and "|" in line


def test_empty_trace_and_one_token() -> None:
    for n in (0, 1):
        trace = _trace(n=n)
        trace.starts, trace.domains = np.zeros(n, np.int64), (None,) * n
        for view in _views(trace):
            _render(view, 40)


@pytest.mark.parametrize("groups", [1, 3])
def test_figures(tmp_path: Path, groups: int) -> None:
    pytest.importorskip("matplotlib")
    trace = _trace(groups=groups, adapters=9)
    stats = summarise(trace)
    for name, start in (("a.png", b"\x89PNG"), ("a.svg", b"<?xml")):
        write_figure(tmp_path / name, trace, stats)
        data = (tmp_path / name).read_bytes()
        assert data.startswith(start)
        write_figure(tmp_path / f"again-{name}", trace, stats)
        assert data == (tmp_path / f"again-{name}").read_bytes()
    svg = (tmp_path / "a.svg").read_text()
    for text in ("adapter-3", "uniform (1 of 10)", "tokens", "by first choice", "base"):
        assert text in svg


def test_figures_of_layers_positions_and_text(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    trace = _trace(groups=2)
    stats = summarise(trace)
    for view, sign in (("heatmap", ">12<"), ("position", ">n=")):
        write_figure(tmp_path / f"{view}.svg", trace, stats, view=view)
        drawn = (tmp_path / f"{view}.svg").read_text()
        assert "medical" in drawn and "by first choice" in drawn and (sign in drawn)
    write_figure(tmp_path / "tokens.png", trace, stats, view="tokens", limit=20)
    assert (tmp_path / "tokens.png").read_bytes().startswith(b"\x89PNG")


def test_tokens_svg_is_safe_and_asks_nobody() -> None:
    import xml.etree.ElementTree as ET

    svg = tokens_svg(_trace(), limit=100)
    ET.fromstring(svg)
    assert svg == tokens_svg(_trace(), limit=100)
    assert "</script>" not in svg and "&lt;/script&gt;" in svg
    assert set(re.findall(r"https?://[^\s\"']+", svg)) == {"http://www.w3.org/2000/svg"}
    assert HUES[0] in svg.lower()


def test_figure_names_are_checked_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=r"\.png or \.svg"):
        check_figure(tmp_path / "a.pdf", "histogram", force=False)
    (tmp_path / "a.svg").write_text("mine")
    with pytest.raises(InputError, match="exists"):
        check_figure(tmp_path / "a.svg", "tokens", force=False)
    check_figure(tmp_path / "a.svg", "tokens", force=True)
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(InputError, match="matplotlib") as error:
        check_figure(tmp_path / "b.svg", "histogram", force=False)
    assert "molora[figures]" in error.value.remedy
    with pytest.raises(InputError, match="matplotlib"):
        check_figure(tmp_path / "b.png", "tokens", force=False)
    check_figure(tmp_path / "b.svg", "tokens", force=False)  # needs no matplotlib


@pytest.fixture
def facts() -> Callable[[], dict[str, Any]]:
    adapter = {
        "name": "math", "source": "./x\x1b[2J", "revision": None, "licence": "apache-2.0", "dtype": "F32",
        "parameters": 1234, "modules": 2, "targets": {"q_proj": 2}, "ranks": {"4": 1, "8": 1},
        "scales": [1.0, 2.0],
        "coverage": {"matched": 2, "in_file": 2, "in_base": 8}, "effect": {"rms": 0.5, "base_rms": 2.0},
        "notes": ["a note"],
    }  # fmt: skip
    groups = [[0, 1], [1, 2], [2, 4]]
    stage = {"kind": "dummy", "k": 1, "temperature": 1.0, "groups": groups, "experts": ["math"]}
    return lambda: {
        "path": "b", "base": {"id": "org/base", "revision": "v1", "path": None, "problem": "not here"},
        "adapters": [adapter], "router": {"kind": "dummy", "stages": [stage], "training": {"seed": 0}},
    }  # fmt: skip


@pytest.mark.parametrize("width", [40, 80, 160])
def test_bundle_view(facts: Callable[[], dict[str, Any]], width: int) -> None:
    text = _render(BundleView(facts()), width)
    whole = " ".join(text.split())
    for part in ("org/base@v1", "not here", "1,234", "2 of 8", "25.0 %", "dummy", "0-0, 1-1, 2-3", "a note"):
        assert part in whole, part
    assert "\x1b" not in text and all(cell_len(line) <= width for line in text.split("\n"))
    none = {**facts(), "router": None}
    assert "none yet" in _render(BundleView(none), width)


def test_adapter_view_gives_every_reason_with_its_remedy() -> None:
    bias = {"field": "bias", "why": "trains the base", "remedy": "do not"}
    reasons = [bias, {"field": "", "why": "odd", "remedy": ""}]
    found = {
        "path": "a", "kind": "lora", "verdict": "refused", "reasons": reasons, "notes": [], "base": None,
        "config": {"r": 4}, "weights": {"file": None, "problem": "there is no adapter_model.safetensors"},
    }  # fmt: skip
    text = _render(AdapterView(found), 80)
    for part in ("refused", "bias: trains the base", "do not", "odd", "there is no adapter_model"):
        assert part in text
