"""`molora inspect` on real tiny bundles: what it reads, what it shows, what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from molora_cli.app import app
from molora_cli.core.bundle.store import Bundle, set_default_bundle
from molora_cli.core.inspection import recognise
from molora_cli.core.pieces import join_pieces
from molora_cli.core.router.spec import RouterSpec, StageSpec
from molora_cli.core.texts import Texts, read_documents
from molora_cli.core.trace_files import load_trace
from molora_cli.core.tracing import BLOCK, trace_texts
from molora_cli.errors import InputError

Run = Callable[..., str]


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """run(*arguments, input=None) -> stdout; errors come as exceptions."""

    def invoke(*arguments: object, input: str | None = None) -> str:
        monkeypatch.setenv("COLUMNS", "100")
        result = CliRunner().invoke(app, ["inspect", *map(str, arguments)], input=input)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert result.exit_code == 0, result.output
        return result.stdout

    return invoke


@pytest.fixture(scope="module")
def plain_bundle(
    tiny_llama: Path, make_adapter: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Two adapters, no router."""
    adapters = [f"{name}={make_adapter(tiny_llama, name, seed=i)}" for i, name in enumerate(("math", "code"))]
    folder = tmp_path_factory.mktemp("bundles") / "bundle"
    result = CliRunner().invoke(app, ["compose", "-o", str(folder), "--base", str(tiny_llama), *adapters])
    assert result.exit_code == 0, (result.output, result.exception)
    return folder


@pytest.fixture
def bundle(plain_bundle: Path, tmp_path: Path) -> Path:
    """The same with a vocab router: the letter x goes to math, digits to code, the rest to the base."""
    import shutil

    folder = tmp_path / "bundle"
    shutil.copytree(plain_bundle, folder)
    arguments = ["--kind", "vocab", "--rule", "math=token:x", "--rule", "code=regex:^[0-9]$"]
    result = CliRunner().invoke(app, ["attach-router", str(folder), *arguments, "--rest", "base"])
    assert result.exit_code == 0, (result.output, result.exception)
    return folder


def test_facts_of_a_bundle(run: Run, plain_bundle: Path, bundle: Path, tiny_llama: Path) -> None:
    document = json.loads(run(plain_bundle, "--json"))
    assert document["what"] == "bundle" and document["router"] is None
    assert document["base"]["path"] == str(tiny_llama) and document["base"]["problem"] is None
    math = document["adapters"][0]
    assert (math["name"], math["ranks"], math["targets"]) == ("math", {"4": 8}, {"q_proj": 4, "v_proj": 4})
    assert math["scales"] == [2.0] and math["effect"]["rms"] > 0
    text = run(bundle)
    assert "vocab" in text and "experts:" in text and "math" in text


def test_headers_only(bundle: Path) -> None:
    """No torch, transformers or peft for a bundle, an adapter or a trace without text."""
    code = (
        "import sys\nfrom molora_cli.app import app\n"
        "for place in sys.argv[1:]:\n    app(['inspect', place], standalone_mode=False)\n"
        "print([m for m in ('torch', 'transformers', 'peft', 'matplotlib') if m in sys.modules])"
    )
    places = [
        str(bundle),
        str(bundle / "adapters" / "math"),
        str(bundle / "adapters" / "math" / "adapter_config.json"),
    ]
    done = subprocess.run([sys.executable, "-c", code, *places], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("[]")


def test_unknown_router_kinds_are_shown_and_not_run(run: Run, bundle: Path) -> None:
    groups = [(0, 1), (1, 2), (2, 4)]
    stage = StageSpec(kind="from-the-future", experts=["math", "__base__"], groups=groups, params={"x": 1})
    Bundle.open(bundle).set_router(RouterSpec(stages=[stage]), {"stages.0.w": np.zeros(3, np.float32)})
    text = run(bundle)
    assert "from-the-future" in text and "layers: 0-0, 1-1, 2-3" in text and "math, base" in text
    with pytest.raises(InputError, match="from-the-future"):
        run(bundle, "--prompt", "hello")


def test_tokens_go_where_the_rules_say(run: Run, bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_text('{"text": "xx12"}\n{"text": "abx"}\n')
    arguments = ["--data", f"d={tmp_path / 'd.jsonl'}", "--prompt", "x1y", "--json", "--tokens"]
    document = json.loads(run(bundle, *arguments))
    assert document["documents"] == 3 and document["tokens"] == 10
    total = document["stats"]["groups"][0]["total"]
    assert total["share"] == pytest.approx([0.4, 0.3, 0.3])
    assert [r["indices"][0][0] for r in document["listing"]][:3] == [0, 1, -1]
    assert [r["text"] for r in document["listing"]][:3] == ["x", "1", "y"]
    by_domain = {p["name"]: p for p in document["stats"]["groups"][0]["domains"]}
    assert by_domain["d"]["share"] == pytest.approx([3 / 7, 2 / 7, 2 / 7])


def test_human_view_of_a_text(run: Run, bundle: Path) -> None:
    text = run(bundle, "--prompt", "xx12\x1b[2J")
    assert "m·xx" in text and "c·12" in text and "-·\\x1b[c·2-·J" in text
    assert "- base" in text and "uniform" in text and "switches" in text and "\x1b" not in text
    assert "m·xx" not in run(bundle, "--prompt", "xx12", "--no-tokens")


def test_standard_input_and_the_default_bundle(run: Run, bundle: Path) -> None:
    set_default_bundle(bundle)
    for arguments in (["-"], ["--stdin"], ["--prompt", "-"]):
        assert json.loads(run(*arguments, "--json", input="x1"))["tokens"] == 2
    assert json.loads(run("--json"))["what"] == "bundle"
    with pytest.raises(InputError, match="empty"):
        run("-", input="  \n")


def test_saved_traces_show_the_same(run: Run, bundle: Path, tmp_path: Path) -> None:
    file = tmp_path / "t.trace"
    first = json.loads(run(bundle, "--prompt", "x1 日本 y", "--save-trace", file, "--json", "--tokens"))
    again = json.loads(run(file, "--json", "--tokens"))
    assert again == first
    assert load_trace(file).meta["digest"] == Bundle.open(bundle).digest
    with pytest.raises(InputError, match="exists"):
        run(bundle, "--prompt", "x", "--save-trace", file)
    with pytest.raises(InputError, match="no router"):
        run(file, "--prompt", "x")


def test_figures(run: Run, bundle: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    run(bundle, "--prompt", "x1", "--figure", tmp_path / "f.png")
    assert (tmp_path / "f.png").read_bytes().startswith(b"\x89PNG")
    run(bundle, "--prompt", "x1", "--figure", tmp_path / "f.svg", "--view", "tokens")
    assert (tmp_path / "f.svg").read_text().startswith("<svg")
    with pytest.raises(InputError, match="--view"):
        run(bundle, "--prompt", "x1", "--view", "cake")
    with pytest.raises(InputError, match="no text to draw"):
        run(bundle, "--figure", tmp_path / "g.png")


def test_reports_and_a_second_router(run: Run, bundle: Path, tmp_path: Path) -> None:
    import shutil

    other = tmp_path / "other"
    shutil.copytree(bundle, other)
    rules = ["--rule", "math=token:x", "--rule", "math=regex:^[0-9]$", "--rest", "base"]
    result = CliRunner().invoke(app, ["attach-router", str(other), "--kind", "vocab", *rules, "--force"])
    assert result.exit_code == 0, (result.output, result.exception)
    page, trace = tmp_path / "r.html", tmp_path / "t.trace"
    texts = ["--prompt", "xx1", "--prompt", "y<b>日"]
    arguments = [*texts, "--report", page, "--compare", other, "--save-trace", trace, "--json"]
    document = json.loads(run(bundle, *arguments))
    # x, x, y, < and so on agree; the digit goes to code here and to math there
    assert document["compared_with"] == str(other)
    assert document["agreement"]["tokens"] - document["agreement"]["agreed"] == 1
    assert document["agreement"]["matrix"][1] == [1, 0, 0]
    text = page.read_text(encoding="utf-8")
    data = json.loads(text.partition('id="data">')[2].partition("</script>")[0])
    assert [side["name"] for side in data["sides"]] == ["bundle", "other"]
    assert data["sides"][0]["adapters"][0]["name"] == "math" and data["compare"]["same_text"]
    assert "<b>" not in text.partition("<body>")[2].replace("<body>", "")
    # the same from the saved trace, which finds its bundle again; a place that is taken is refused first
    with pytest.raises(InputError, match="exists"):
        run(trace, "--report", page)
    run(trace, "--report", page, "--compare", other, "--force")
    again = page.read_text(encoding="utf-8")
    assert again.replace('"name":"t.trace"', '"name":"bundle"') == text
    shown = run(trace, "--view", "histogram", "--compare", trace)
    assert "100.0 % of" in shown and "switches" not in shown
    with pytest.raises(InputError, match="neither a bundle nor a trace"):
        run(trace, "--compare", bundle / "adapters" / "math")
    with pytest.raises(InputError, match="HTML page"):
        run(trace, "--report", tmp_path / "r.pdf")


def test_another_base_has_other_tokens(run: Run, bundle: Path, tmp_path: Path) -> None:
    from molora_cli.core.trace_files import save_trace

    run(bundle, "--prompt", "xx1", "--save-trace", tmp_path / "t.trace")
    trace = load_trace(tmp_path / "t.trace")
    trace.token_ids = trace.token_ids + 5000
    save_trace(tmp_path / "big.trace", trace)
    with pytest.raises(InputError, match="has 320 tokens"):
        run(tmp_path / "big.trace", "--compare", bundle)
    trace.meta["base"] = "org/another"
    save_trace(tmp_path / "foreign.trace", trace)
    with pytest.raises(InputError, match="was made with org/another"):
        run(tmp_path / "foreign.trace", "--compare", bundle)


def test_chats_go_through_the_template(run: Run, bundle: Path, tmp_path: Path) -> None:
    rows = [
        {"messages": [{"role": "user", "content": "x1"}, {"role": "assistant", "content": "1"}], "label": "q"}
    ]
    (tmp_path / "c.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    document = json.loads(run(bundle, "--data", tmp_path / "c.jsonl", "--json", "--tokens"))
    whole = "".join(r["text"] for r in document["listing"])
    assert whole == "<|im_start|>user\nx1<|im_end|>\n<|im_start|>assistant\n1<|im_end|>\n"
    assert document["listing"][0]["domain"] == "q"
    # of the chat only x, 1 and 1 are content: to math, code and code
    assert "".join(r["text"] for r in document["listing"] if not r["template"]) == "x11"
    assert (document["tokens_counted"], document["tokens_of_template"]) == (3, document["tokens"] - 3)
    assert document["stats"]["groups"][0]["total"]["share"] == pytest.approx([1 / 3, 2 / 3, 0])
    counted = json.loads(run(bundle, "--data", tmp_path / "c.jsonl", "--json", "--template"))
    assert counted["tokens_counted"] == counted["tokens"] == document["tokens"]
    assert counted["stats"]["groups"][0]["total"]["share"][2] > 0.5
    prompt = json.loads(run(bundle, "--prompt", "x1", "--chat", "--json", "--tokens"))
    assert prompt["tokens_counted"] == 2
    assert "".join(r["text"] for r in prompt["listing"]) == "<|im_start|>user\nx1<|im_end|>\n"


def test_plain_texts_are_counted_whole(run: Run, bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_text('{"messages": [{"role": "user", "content": "x"}]}\n{"text": "1y"}\n')
    document = json.loads(run(bundle, "--prompt", "<|im_start|>x", "--json"))
    assert document["tokens"] == document["tokens_counted"] == 2 and document["tokens_of_template"] == 0
    mixed = json.loads(run(bundle, "--data", f"d={tmp_path / 'd.jsonl'}", "--json"))
    assert mixed["tokens_counted"] == 3 < mixed["tokens"]
    assert "are left out; --template counts them" in run(bundle, "--data", tmp_path / "d.jsonl")
    assert "left out" not in run(bundle, "--prompt", "x")


TEMPLATES = {
    "its own": None,
    "trims": "{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}{% endfor %}",
    "changes": "{% for m in messages %}[{{ m.role }}]{{ m.content | replace('x', 'yy') }}\n{% endfor %}",
    "refuses system": "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no') }}"
    "{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}",
    "loses system": "{% for m in messages %}{% if m.role != 'system' %}[{{ m.role }}]"
    "{{ m.content }}{% endif %}{% endfor %}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_content_is_found_under_every_template(
    name: str, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = Texts(tiny_llama)
    if TEMPLATES[name]:
        monkeypatch.setattr(texts._load_full(), "chat_template", TEMPLATES[name])
    contents = [" you count ", "日本 x ", "", "x"]
    roles = ["system", "user", "assistant", "user"]
    chat = [{"role": r, "content": c} for r, c in zip(roles, contents, strict=True)]
    ids, found = texts.encode(["plain", chat, [1, 2]])
    assert list(found) == [1] and ids[2] == [1, 2] and len(found[1]) == len(ids[1])
    pieces = texts.pieces(ids[1])
    said = join_pieces(pieces[i] for i, of_message in zip(ids[1], found[1], strict=True) if of_message)
    wanted = {
        "its own": "".join(contents),
        "trims": "you count日本 xx",
        "changes": " you count 日本 yy yy",
    }
    assert said == wanted.get(name, " you count \n\n日本 x x")


def test_content_that_cannot_be_told_apart_is_all_counted(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    picky = "{% for m in messages %}{% if 'x' not in m.content %}{{ raise_exception('no') }}{% endif %}"
    picky += "[{{ m.role }}]{{ m.content }}{% endfor %}"
    texts = Texts(tiny_llama)
    monkeypatch.setattr(texts._load_full(), "chat_template", picky)
    ids, found = texts.encode([[{"role": "user", "content": "x"}]])
    assert len(ids[0]) == len("[user]x") and found[0].all()


def test_batches_and_blocks_route_as_one_by_one(bundle: Path) -> None:
    """Sorting, padding and cutting into blocks change no route, and documents keep their order."""
    opened = Bundle.open(bundle)
    rng = np.random.default_rng(0)
    texts = ["".join(rng.choice(list("xy1 "), size=n)) for n in (5, 0, 1, BLOCK + 7, 90, 3)]
    whole = trace_texts(opened, [("d", t) for t in texts])
    whole.check()
    assert whole.lengths().tolist() == [len(t) for t in texts]
    wanted = np.array([{"x": 0, "1": 1}.get(c, -1) for t in texts for c in t])
    assert np.array_equal(whole.indices[:, 0, 0], wanted)
    ids = trace_texts(opened, [(None, whole.token_ids[:5].tolist())])
    assert np.array_equal(ids.indices, whole.indices[:5])


def test_centroid_router_agrees_with_one_by_one(plain_bundle: Path, tmp_path: Path) -> None:
    """A router with running state: batched, padded and cut equals single documents."""
    import shutil

    from molora_cli.core import tracing

    folder = tmp_path / "b"
    shutil.copytree(plain_bundle, folder)
    data = []
    for name, text in (("math", "1+1=2 "), ("code", "def f(): ")):
        file = tmp_path / f"{name}.jsonl"
        file.write_text("".join(json.dumps({"text": text * (5 + i)}) + "\n" for i in range(12)))
        data += ["--data", f"{name}={file}"]
    result = CliRunner().invoke(app, ["attach-router", str(folder), "--kind", "centroid", *data])
    assert result.exit_code == 0, (result.output, result.exception)
    opened = Bundle.open(folder)
    texts = ["1+1=2 " * 9, "def f(): " * 30, "x", "2=2 def " * 3]
    old, tracing.BLOCK = tracing.BLOCK, 16
    try:
        together = trace_texts(opened, [(None, t) for t in texts])
    finally:
        tracing.BLOCK = old
    for tokens, text in zip(together.documents(), texts, strict=True):
        alone = trace_texts(opened, [(None, text)])
        assert np.array_equal(together.indices[tokens], alone.indices)
        assert together.scores is not None and alone.scores is not None
        np.testing.assert_allclose(together.scores[tokens], alone.scores, atol=1e-5)


def test_what_a_path_is(bundle: Path, tiny_llama: Path, tmp_path: Path) -> None:
    adapter = bundle / "adapters" / "math"
    assert recognise(bundle) == "bundle" and recognise(adapter) == "adapter"
    renamed = tmp_path / "anything.txt"
    renamed.write_bytes((adapter / "adapter_config.json").read_bytes())
    assert recognise(renamed) == "config"
    (tmp_path / "empty").mkdir()
    (tmp_path / "noise").write_bytes(b"\x00\x01\x02 noise")
    cases: list[tuple[Path, str]] = [
        (tiny_llama, "is a model"),
        (bundle / "molora.json", "manifest"),
        (adapter / "adapter_model.safetensors", "no trace"),
        (tmp_path / "empty", "no bundle and no adapter"),
        (tmp_path / "noise", "no kind known"),
        (tmp_path / "missing", "does not exist"),
        (bundle / "adapters", "adapters lie in code, math"),
    ]
    for place, said in cases:
        with pytest.raises(InputError, match=said):
            recognise(place)


def test_adapters_alone(run: Run, bundle: Path, tmp_path: Path) -> None:
    folder = bundle / "adapters" / "math"
    document: dict[str, Any] = json.loads(run(folder, "--json"))
    assert document["verdict"] == "supported" and document["weights"]["ranks"] == {"4": 8}
    config = json.loads((folder / "adapter_config.json").read_text())
    (tmp_path / "c.json").write_text(json.dumps({**config, "init_lora_weights": "pissa"}))
    document = json.loads(run(tmp_path / "c.json", "--json"))
    assert document["verdict"] == "refused" and document["reasons"][0]["field"] == "init_lora_weights"
    assert "because" in run(tmp_path / "c.json")
    (folder / "adapter_model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    document = json.loads(run(folder, "--json"))
    assert document["verdict"] == "refused" and "LFS" in document["weights"]["problem"]


def test_texts_need_a_router(run: Run, plain_bundle: Path) -> None:
    with pytest.raises(InputError, match="no router yet") as error:
        run(plain_bundle, "--prompt", "x")
    assert "train-router" in error.value.remedy
    with pytest.raises(InputError, match="is no file"):
        run(plain_bundle, "--data", "math=/nowhere.jsonl")


def test_documents_are_read_one_at_a_time(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\nnonsense\n')
    (tmp_path / "b.txt").write_text("whole\n\nfile")
    rows = read_documents([f"a={tmp_path / 'a.jsonl'}"])
    assert next(rows) == ("a", "one")
    with pytest.raises(InputError, match="line 2"):
        next(rows)
    assert list(read_documents([str(tmp_path / "b.txt")], ["p"])) == [(None, "p"), ("b", "whole\n\nfile")]


def test_long_text_files_are_cut_at_line_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("molora_cli.core.texts.LONGEST", 10)
    lines = [f"line {i} é\n" for i in range(7)]
    (tmp_path / "a.txt").write_text("".join(lines), encoding="utf-8")
    ticks: list[float] = []
    found = list(read_documents([str(tmp_path / "a.txt")], ticker=lambda done, *rest: ticks.append(done)))
    assert "".join(text for _, text in found if isinstance(text, str)) == "".join(lines)
    assert len(found) == len(ticks) == 4 and {name for name, _ in found} == {"a"}


def test_more_text_than_is_kept(
    run: Run, bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All tokens are counted; the listing and the pages hold those of the first documents."""
    monkeypatch.setattr("molora_cli.core.survey.KEEP", 100)
    monkeypatch.setattr("molora_cli.core.tracing.WINDOW", 4)
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": "xy1 " * 10}) + "\n" for _ in range(20)))
    found = json.loads(run(bundle, "--data", tmp_path / "a.jsonl", "--tokens", "--limit", "9999", "--json"))
    assert (found["tokens"], found["documents"], found["stats"]["groups"][0]["total"]["tokens"]) == (
        800,
        20,
        800,
    )
    assert len(found["listing"]) == 160
    run(bundle, "--data", tmp_path / "a.jsonl", "--save-trace", tmp_path / "all.trace")
    assert len(load_trace(tmp_path / "all.trace")) == 800


def test_verdicts_of_known_cases(run: Run, cases: Path) -> None:
    """Every adapter of the case folder gets a verdict, and it is the index's where the config decides."""
    seen = 0
    for line in (cases / "INDEX.tsv").read_text().splitlines()[1:]:
        path, _, must, *_ = line.split("\t")
        folder = cases / path
        if not path.startswith("adapters/") or not (folder / "adapter_config.json").is_file():
            continue
        document = json.loads(run(folder, "--json"))
        seen += 1
        if must == "exact":
            assert document["verdict"] == "supported", path
        if must == "refused":
            assert document["verdict"] == "refused" and document["reasons"], path
    assert seen > 20
