"""`molora attach-router`: rules, examples and constants become a router that a bundle keeps."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from molora_cli.app import app
from molora_cli.core.base.embedding import read_embedding
from molora_cli.core.base.fingerprint import fingerprint
from molora_cli.core.base.structure import read_structure
from molora_cli.core.bundle.manifest import AdapterEntry, BaseEntry, Manifest
from molora_cli.core.bundle.store import Bundle, dump_manifest, sha256_file
from molora_cli.core.router.attach import Request, attach
from molora_cli.core.router.centroid import CentroidStage, extend_centroid, fit_centroid
from molora_cli.core.router.files import load_tensors
from molora_cli.core.router.kinds import Surroundings
from molora_cli.core.router.moments import Moments
from molora_cli.core.router.pattern import matching
from molora_cli.core.router.stack import RouterStack, load_router
from molora_cli.core.router.vocab import Vocabulary, build_vocab, parse_rule, rule_ids
from molora_cli.errors import InputError, MoloraError

WORDS = Vocabulary(("<pad>", "a", " 12", "the", "7", "", "\n", "]"), frozenset({0}))


@pytest.fixture
def bundle(tmp_path: Path, tiny_llama: Path, make_adapter: Callable[..., Path]) -> Bundle:
    """A bundle of two adapters, written by hand."""
    folder = tmp_path / "bundle"
    entries = []
    for seed, name in enumerate(("text", "figures")):
        (folder / "adapters" / name).mkdir(parents=True)
        made = make_adapter(tiny_llama, name, seed=seed)
        for file in ("adapter_config.json", "adapter_model.safetensors"):
            (folder / "adapters" / name / file).write_bytes((made / file).read_bytes())
        digest = sha256_file(made / "adapter_model.safetensors")
        entries.append(AdapterEntry(name=name, folder=f"adapters/{name}", source="here", sha256=digest))
    base = BaseEntry(id="tiny", fingerprint=fingerprint(tiny_llama, list(read_structure(tiny_llama))))
    (folder / "molora.json").write_text(dump_manifest(Manifest(base=base, adapters=entries)))
    return Bundle.open(folder, str(tiny_llama))


def run(*arguments: object) -> Any:
    """The command's JSON; raises what it raises."""
    result = CliRunner().invoke(app, ["attach-router", *map(str, arguments), "--json"])
    if isinstance(result.exception, MoloraError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def router_of(bundle: Bundle) -> RouterStack:
    again = Bundle.open(bundle.path, str(bundle.base_path))
    around = Surroundings(n_layers=4, embedding=read_embedding(bundle.base_path))
    router = load_router(again, around)
    assert router is not None
    return router


def routes(router: RouterStack, ids: list[int]) -> list[int]:
    decision, _ = router.decide(torch.tensor([ids]), None, router.start(1))
    return decision.route.indices[0, :, 0, 0].tolist()


# -- vocab ------------------------------------------------------------------
@pytest.mark.parametrize(
    ("rule", "ids"),
    [
        ("x=ids:1,3-4", [1, 3, 4]),
        ("x=range:2-4", [2, 3, 4]),
        ("x=range:0-1,6-7", [0, 1, 6, 7]),
        ("x=token:the", [3]),
        (r"x=regex:^\s*\d+$", [2, 4]),
        ("x=regex:^.?$", [1, 4, 6, 7]),
        ("x=class:special", [0]),
        ("x=class:digit", [2, 4]),
        ("x=class:space", [6]),
        ("x=token:]", [7]),
    ],
)
def test_rules_say_which_tokens(rule: str, ids: list[int]) -> None:
    assert rule_ids(parse_rule(rule), WORDS) == ids


@pytest.mark.parametrize(
    ("rule", "says"),
    [
        ("ids:1", "not a rule"),
        ("x=ids:", "not a rule"),
        ("x=glob:a", "not a rule"),
        ("x=ids:1,b", "'b'"),
        ("x=ids:-1", "no id or range"),
        ("x=range:3", "no id or range"),
        ("x=range:4-2", "ends before"),
        ("x=range:4-8", "outside the vocabulary"),
        ("x=token:absent", "matches no token"),
        ("x=regex:absent", "matches no token"),
        ("x=regex:(", "not a regular expression"),
        ("x=class:verbs", "no class"),
        ("x=ids:" + "9" * 5000, "no id or range"),
    ],
)
def test_bad_rules_are_refused(rule: str, says: str) -> None:
    with pytest.raises(InputError, match=says) as caught:
        rule_ids(parse_rule(rule), WORDS)
    assert len(str(caught.value)) < 500


def test_a_pattern_that_never_ends_is_stopped() -> None:
    begun = time.monotonic()
    with pytest.raises(InputError, match="nested repetition"):
        matching("^(a+)+$", ["a" * 64 + "b"], seconds=3)
    assert time.monotonic() - begun < 20


def test_overlaps_between_adapters_are_listed() -> None:
    rules = [parse_rule(r) for r in ("x=ids:1-3", "x=ids:3-4", "y=regex:[0-9]")]
    with pytest.raises(InputError, match=r"x=ids:1-3.*y=regex.*2 ' 12', 4 '7'"):
        build_vocab(rules, WORDS, None)


def test_vocab_decides_by_id_alone() -> None:
    stage, tensors = build_vocab([parse_rule("b=ids:1"), parse_rule("a=ids:2-3")], WORDS, None)
    tensors = {f"stages.0.{n}": t for n, t in tensors.items()}
    from molora_cli.core.router.spec import RouterSpec

    router = RouterStack(RouterSpec(stages=[stage]), tensors, Surroundings(n_layers=2), ("a", "b"))
    assert routes(router, [1, 2, 3, 4, 99, -5]) == [1, 0, 0, -1, -1, -1], "ids beyond the table take the base"
    tensors["stages.0.table"][0] = 7
    with pytest.raises(InputError, match="does not name"):
        RouterStack(RouterSpec(stages=[stage]), tensors, Surroundings(n_layers=2), ("a", "b"))


def test_vocab_of_a_bundle(bundle: Bundle) -> None:
    with pytest.raises(InputError, match=r"no rule covers \d+ of 320 tokens.*'<pad>'"):
        run(bundle.path, "--base", bundle.base_path, "--kind", "vocab", "--rule", "figures=class:digit")
    done = run(
        bundle.path, "--base", bundle.base_path, "--kind", "vocab", "--rule", "figures=regex:^[0-9]$",
        "--rule", "base=class:special", "--rest", "text",
    )  # fmt: skip
    assert done["tokens"]["figures"] == 10 and done["tokens"]["__base__"] == 6 and done["written"]
    ids = bundle_ids(bundle, "a1\n2")
    assert routes(router_of(bundle), [*ids, 0]) == [0, 1, 0, 1, -1]
    stored = load_tensors(bundle.path / "router.safetensors")
    assert list(stored) == ["stages.0.table"] and stored["stages.0.table"].dtype == torch.int32


def bundle_ids(bundle: Bundle, text: str) -> list[int]:
    from transformers import AutoTokenizer

    ids = AutoTokenizer.from_pretrained(bundle.base_path)(text, add_special_tokens=False)["input_ids"]
    assert isinstance(ids, list)
    return ids


# -- constants --------------------------------------------------------------
def test_fixed_and_uniform(bundle: Bundle) -> None:
    where = (bundle.path, "--base", bundle.base_path, "--kind")
    run(*where, "fixed", "--expert", "figures")
    assert routes(router_of(bundle), [70, 80]) == [1, 1]
    with pytest.raises(InputError, match=r"router already \(fixed\)"):
        run(*where, "uniform")
    done = run(*where, "fixed", "--expert", "text=3", "--expert", "base=1", "--force")
    assert done["weights"] == {"text": 3.0, "__base__": 1.0}
    assert run(*where, "uniform", "--force", "--dry-run")["written"] is False
    assert router_of(bundle).spec.kind == "fixed"
    run(*where, "uniform", "--force")
    decision, _ = router_of(bundle).decide(torch.tensor([[70]]), None, router_of(bundle).start(1))
    assert decision.route.gates.flatten().tolist() == [0.5, 0.5]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["fixed"], "needs an adapter"),
        (["fixed", "--expert", "poetry"], "no adapter 'poetry'"),
        (["fixed", "--expert", "text=much"], "no number"),
        (["fixed", "--expert", "text=-1"], "above 0"),
        (["fixed", "--expert", "text", "--expert", "text=2"], "twice"),
        (["fixed", "--expert", "text", "--top-k", "2"], "--top-k means nothing"),
        (["uniform", "--rule", "text=ids:1"], "--rule means nothing"),
        (["vocab"], "needs rules"),
        (["vocab", "--rule", "poetry=ids:1"], "no adapter 'poetry'"),
        (["vocab", "--rule", "text=ids:1", "--before"], "no router yet"),
        (["context"], "no router of kind"),
        (["centroid"], "no training rows"),
    ],
)
def test_bad_requests_write_nothing(bundle: Bundle, arguments: list[str], says: str) -> None:
    with pytest.raises(InputError, match=says) as caught:
        run(bundle.path, "--base", bundle.base_path, "--kind", *arguments)
    assert caught.value.remedy
    assert not (bundle.path / "router.safetensors").exists()


# -- centroid ---------------------------------------------------------------
def write_rows(path: Path, letters: str, count: int = 20) -> Path:
    generator = torch.Generator().manual_seed(len(letters))
    lines = []
    for _ in range(count):
        picked = torch.randint(len(letters), (40,), generator=generator).tolist()
        lines.append(json.dumps({"text": "".join(letters[i] for i in picked)}))
    path.write_text("\n".join(lines))
    return path


def test_centroid_then_rules_in_front(bundle: Bundle, tmp_path: Path) -> None:
    where = (bundle.path, "--base", bundle.base_path, "--kind")
    words, digits = write_rows(tmp_path / "w", "abcdefg"), write_rows(tmp_path / "d", "0123456")
    data = ("--data", f"text={words}", "--data", f"figures={digits}")
    done = run(*where, "centroid", *data, "--temperature", "2", "--top-k", "2")
    assert done["held_out_accuracy"] == {"text": 1.0, "figures": 1.0}
    assert min(done["tokens"].values()) > 800, "held-out rows and mixes teach too"
    router = router_of(bundle)
    assert router.k == 2 and router.spec.stages[0].temperature == 2.0
    assert router.spec.tokenizer == bundle.manifest.base.fingerprint.tokenizer
    ids = bundle_ids(bundle, "abcabcab1234512345")
    assert routes(router, ids)[5] == 0 and routes(router, ids)[-1] == 1
    whole, _ = router.decide(torch.tensor([ids]), None, router.start(1))
    state, parts = router.start(1), []
    for piece in (ids[:1], ids[1:9], ids[9:]):
        decision, state = router.decide(torch.tensor([piece]), None, state)
        parts.append(decision.scores)
    torch.testing.assert_close(torch.cat(parts, 1), whole.scores, rtol=0, atol=1e-9)

    before = load_tensors(bundle.path / "router.safetensors")
    done = run(*where, "vocab", "--rule", "base=token:5", "--before")
    assert done["kind"] == "vocab+centroid" and done["left"] == 319
    after = load_tensors(bundle.path / "router.safetensors")
    for name, tensor in before.items():
        assert torch.equal(after[name.replace("stages.0", "stages.1")], tensor)
    router = router_of(bundle)
    assert router.k == 2
    found = routes(router, ids)
    assert found[-1] == -1 and found[-2] == 1 and found[5] == 0


def test_a_padded_batch_scores_like_its_rows(bundle: Bundle, tmp_path: Path) -> None:
    words, digits = write_rows(tmp_path / "w", "abcdefg"), write_rows(tmp_path / "d", "0123456")
    made = attach(bundle, Request(kind="centroid", data=[f"text={words}", f"figures={digits}"]))
    around = Surroundings(n_layers=4, embedding=read_embedding(bundle.base_path))
    router = RouterStack(made.spec, made.tensors, around, bundle.adapters)
    rows = [bundle_ids(bundle, "abc123abc"), bundle_ids(bundle, "12")]
    ids, mask = torch.zeros(2, 9, dtype=torch.int64), torch.zeros(2, 9, dtype=torch.bool)
    ids[0], mask[0] = torch.tensor(rows[0]), True
    ids[1, -2:], mask[1, -2:] = torch.tensor(rows[1]), True
    batch, _ = router.decide(ids, mask, router.start(2))
    for row, own in enumerate(rows):
        alone, _ = router.decide(torch.tensor([own]), None, router.start(1))
        torch.testing.assert_close(batch.scores[row, -len(own) :], alone.scores[0], rtol=0, atol=1e-9)


class Row:
    def __init__(self, ids: list[int], label: int) -> None:
        self.ids = torch.tensor(ids)
        self.labels = torch.full((len(ids),), label)


def test_adding_an_expert_equals_fitting_all() -> None:
    generator = torch.Generator().manual_seed(0)
    embedding = torch.randn(90, 12, generator=generator)
    rows = [
        Row((torch.randint(30, (25,), generator=generator) + 30 * label).tolist(), label)
        for label in (0, 1, 2)
        for _ in range(6)
    ]
    names = ["a", "b", "c"]
    all_spec, everything = fit_centroid(embedding, rows, names)
    first_spec, first = fit_centroid(embedding, rows[:12], names[:2])
    spec, grown = extend_centroid(first_spec, first, embedding, rows[12:], names)
    assert spec.params["tokens"] == all_spec.params["tokens"] == {"a": 150, "b": 150, "c": 150}
    around = Surroundings(n_layers=1, embedding=embedding)
    ids = torch.arange(90).unsqueeze(0)
    mask = torch.ones_like(ids, dtype=torch.bool)
    one, other = CentroidStage(all_spec, everything, around), CentroidStage(spec, grown, around)
    expected, found = one.score(ids, mask, one.start(1))[0], other.score(ids, mask, other.start(1))[0]
    torch.testing.assert_close(found.logp, expected.logp, rtol=1e-3, atol=1e-3)
    assert torch.equal(found.logp.argmax(-1), expected.logp.argmax(-1))
    with pytest.raises(InputError, match="order"):
        extend_centroid(first_spec, first, embedding, rows, ["b", "a"])
    with pytest.raises(InputError, match="'c'"):
        fit_centroid(embedding, rows[:12], names)


def test_moments_add_up() -> None:
    x = torch.randn(40, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 5
    moments = Moments.empty(2, 3)
    for part in (x[:1], x[1:30], x[30:30], x[30:]):
        moments.add(1, part)
    torch.testing.assert_close(moments.mean[1], x.mean(0))
    torch.testing.assert_close(moments.scatter, x.T.cov() * 39)
    assert moments.count.tolist() == [0, 40]
    again = Moments.of_tensors(moments.tensors())
    torch.testing.assert_close(again.scatter, moments.scatter, rtol=1e-6, atol=1e-6)


@pytest.mark.real
@pytest.mark.slow
def test_centroid_on_four_domains(data: Path) -> None:
    """Measured 96 % of held-out tokens from 16 examples a domain; 66 % with Euclidean distance."""
    from molora_cli.core.base.model import load_tokenizer
    from molora_cli.core.base.resolve import resolve_base
    from molora_cli.core.training.data import read_examples
    from molora_cli.core.training.router_rows import RouterSettings, prepare

    base = resolve_base("smollm2").path
    names = ("math", "code", "sql", "med")
    tokenizer, settings = load_tokenizer(base), RouterSettings(mixes=0, val_share=0.0)
    learnt = prepare({n: read_examples(data / f"{n}.train.jsonl")[:16] for n in names}, tokenizer, settings)
    tested = prepare({n: read_examples(data / f"{n}.val.jsonl")[:30] for n in names}, tokenizer, settings)
    embedding = read_embedding(base)
    spec, tensors = fit_centroid(embedding, [r for n in names for r in learnt.train[n]], names)
    stage = CentroidStage(spec, tensors, Surroundings(n_layers=30, embedding=embedding))
    found = []
    for label, name in enumerate(names):
        for row in tested.train[name]:
            ids = row.ids.unsqueeze(0)
            scores, _ = stage.score(ids, torch.ones_like(ids, dtype=torch.bool), stage.start(1))
            found += (scores.logp[0, :, 0].argmax(-1) == label)[row.labels >= 0].tolist()
    assert sum(found) / len(found) > 0.93
