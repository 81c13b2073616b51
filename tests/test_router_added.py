"""One more expert in a trained context router: the others keep every bit, and it takes its own tokens."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from molora_cli.app import app
from molora_cli.core.base.embedding import read_embedding
from molora_cli.core.bundle.store import Bundle
from molora_cli.core.router.context import ContextStage
from molora_cli.core.router.files import load_tensors, stage_tensors
from molora_cli.core.router.kinds import Surroundings
from molora_cli.core.router.moments import Moments
from molora_cli.errors import InputError

TEXTS = {
    "one": ["12 + 30 = 42", "7 * 6 = 42", "100 - 58 = 42", "84 / 2 = 42", "1 + 1 = 2", "9 - 3 = 6"],
    "two": ["def add(a): return a", "for x in y: pass", "if a: b()", "x = y(z)", "del a", "a[b] = c"],
    "new": [
        "ASPIRIN TWICE DAILY",
        "REST AND WATER",
        "FEVER AND COUGH",
        "MILD ACHE",
        "SORE THROAT",
        "NO PAIN",
    ],
}
Tensors = dict[str, torch.Tensor]


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [*map(str, arguments)])


def done(*arguments: object) -> dict[str, Any]:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, (result.output, result.exception)
    return json.loads(result.stdout)  # type: ignore[no-any-return]


def refused(*arguments: object) -> str:
    error = run(*arguments).exception
    assert isinstance(error, InputError) and error.remedy, error
    return f"{error.message} {error.remedy}"


def write_rows(folder: Path) -> dict[str, Path]:
    found = {}
    for name, texts in TEXTS.items():
        found[name] = folder / f"{name}.jsonl"
        lines = (json.dumps({"text": f"{text} " * (3 + i)}) for i in range(2) for text in texts)
        found[name].write_text("\n".join(lines) + "\n")
    return found


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    return write_rows(tmp_path)


@pytest.fixture(scope="module")
def made_grown(made_pair: Path, trio: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("grown")
    rows, bundle = write_rows(folder), folder / "bundle"
    shutil.copytree(made_pair, bundle)
    data = [f"--data={name}={rows[name]}" for name in ("one", "two")]
    assert run("train-router", bundle, *data, "--steps", 60, "--mixes", 20, "--force").exit_code == 0
    done("add", bundle, f"new={trio['new']}")
    return bundle


@pytest.fixture
def grown(made_grown: Path, tmp_path: Path) -> Path:
    """Adapters one, two and new; a context router that knows one and two."""
    shutil.copytree(made_grown, tmp_path / "bundle")
    return tmp_path / "bundle"


def tensors(bundle: Path) -> Tensors:
    return load_tensors(bundle / "router.safetensors")


def stage(bundle: Path) -> ContextStage:
    opened = Bundle.open(bundle)
    spec = opened.router_spec
    assert spec is not None
    around = Surroundings(n_layers=1, embedding=read_embedding(opened.base_path))
    return ContextStage(spec.stages[0], stage_tensors(tensors(bundle), 0), around)


def scores(found: ContextStage, ids: torch.Tensor) -> torch.Tensor:
    """(T, E) log-probabilities."""
    logp: torch.Tensor = found.score(ids, torch.ones_like(ids).bool(), found.start(1))[0].logp[0, :, 0]
    return logp


def same_but_statistics(before: Tensors, after: Tensors) -> bool:
    kept = [key for key in before if "statistics" not in key]
    return all(torch.equal(before[key], after[key]) for key in kept)


@pytest.mark.parametrize("replay", [False, True])
@pytest.mark.parametrize("head", ["mlp", "lda"])
def test_only_the_new_expert_is_trained(grown: Path, files: dict[str, Path], replay: bool, head: str) -> None:
    before, old = tensors(grown), stage(grown)
    data = [f"--data={name}={files[name]}" for name in (("one", "two", "new") if replay else ("new",))]
    found = done("train-router", grown, "--only", "new", *data, "--head", head, "--steps", 120)
    after, new = tensors(grown), stage(grown)
    assert same_but_statistics(before, after)
    assert found["experts"] == ["one", "two", "new"] == list(new.experts)
    assert found["changed"]["new"]["before"] == 0 and found["changed"]["new"]["after"] > 0.8
    assert found["from_statistics"] == ([] if replay or head == "lda" else ["one", "two"])
    if replay:
        assert {"one", "two", "mixed"} < set(found["changed"])
    ids = torch.randint(1, 90, (1, 40), generator=torch.Generator().manual_seed(0))
    first, second = scores(old, ids), scores(new, ids)
    torch.testing.assert_close(second.exp().sum(-1), torch.ones(40, dtype=torch.float64))
    # the odds between the two are what they were
    torch.testing.assert_close(second[:, 0] - second[:, 1], first[:, 0] - first[:, 1], rtol=0, atol=1e-12)
    # state carried over blocks gives the same scores
    part, state = new.score(ids[:, :17], torch.ones(1, 17).bool(), new.start(1))
    rest, _ = new.score(ids[:, 17:], torch.ones(1, 23).bool(), state)
    blocks = torch.cat([part.logp, rest.logp], 1)[0, :, 0]
    torch.testing.assert_close(blocks, second, rtol=0, atol=1e-9)


def test_what_all_texts_begin_with_stays_with_the_others(
    grown: Path, tmp_path: Path, tiny_llama: Path
) -> None:
    from transformers import AutoTokenizer

    data = []
    for name, texts in TEXTS.items():
        file = tmp_path / f"{name}.chats.jsonl"
        chats = ([{"role": "user", "content": t}, {"role": "assistant", "content": t}] for t in texts)
        file.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
        data.append(f"--data={name}={file}")
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    chat = [{"role": "user", "content": "NO PAIN"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False)
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
    before = text.index("NO PAIN") - len("<|im_start|>") + 1  # tokens: one marker, then a byte each
    done("train-router", grown, "--only", "new", *data, "--steps", 120)
    chosen = scores(stage(grown), ids).argmax(-1)
    assert before > 3 and (chosen[:before] != 2).all()
    assert (chosen[before + 1 : before + 7] == 2).sum() >= 4


def test_the_same_seed_gives_the_same_router(grown: Path, files: dict[str, Path]) -> None:
    saved = (grown / "router.safetensors").read_bytes()
    manifest = (grown / "molora.json").read_bytes()
    found = []
    for _ in range(2):
        (grown / "router.safetensors").write_bytes(saved)
        (grown / "molora.json").write_bytes(manifest)
        done("train-router", grown, "--only", "new", f"--data=new={files['new']}", "--seed", 3, "--steps", 20)
        found.append((grown / "router.safetensors").read_bytes())
    assert found[0] == found[1] != saved


def test_closed_form_of_an_added_adapter(pair: Path, trio: dict[str, Path], files: dict[str, Path]) -> None:
    """molora add with rows: log p(new) is that of a discriminant analysis on the summed statistics."""
    data = [f"--data={name}={files[name]}" for name in ("one", "two")]
    assert run("train-router", pair, *data, "--steps", 20, "--mixes", 8, "--force").exit_code == 0
    before = stage_tensors(tensors(pair), 0)
    report = done("add", pair, f"new={trio['new']}", f"--data=new={files['new']}")
    assert report["router"]["held_out_accuracy"]["new"] > 0.8
    after, new = stage_tensors(tensors(pair), 0), stage(pair)
    known, grown = Moments.of_tensors(before), Moments.of_tensors(after)
    assert torch.equal(grown.count[:2], known.count) and torch.equal(grown.mean[:2], known.mean)
    pooled = grown.scatter / grown.count.sum()
    size = len(pooled)
    shrunk = 0.98 * pooled + 0.02 * pooled.trace() / size * torch.eye(size, dtype=torch.float64)
    weight = torch.linalg.solve(shrunk, grown.mean.T)
    bias = -0.5 * (grown.mean.T * weight).sum(0)
    ids = torch.randint(1, 90, (1, 30), generator=torch.Generator().manual_seed(0))
    features, _ = new.features(ids, None, new.start(1))
    wanted = (features[0] @ weight + bias).log_softmax(-1)[:, 2]
    torch.testing.assert_close(scores(new, ids)[:, 2], wanted, rtol=1e-4, atol=1e-4)


def test_added_experts_can_be_taken_out(grown: Path, files: dict[str, Path]) -> None:
    ids = torch.randint(1, 90, (1, 30), generator=torch.Generator().manual_seed(0))
    before, old = tensors(grown), scores(stage(grown), ids)
    done("train-router", grown, "--only", "new", f"--data=new={files['new']}", "--head", "lda")
    with_new = scores(stage(grown), ids)
    done("remove", grown, "one")
    left = stage(grown)
    assert list(left.experts) == ["two", "new"] and bool(torch.isfinite(scores(left, ids)).all())
    done("remove", grown, "new")
    assert list(stage(grown).experts) == ["two"]
    assert torch.equal(tensors(grown)["stages.0.outer.weight"], before["stages.0.outer.weight"][1:])
    assert with_new.shape[1] == old.shape[1] + 1


def test_refusals(grown: Path, files: dict[str, Path]) -> None:
    data = f"--data=new={files['new']}"
    assert "no adapter 'other'" in refused("train-router", grown, "--only", "other", data)
    assert "knows 'one' already" in refused("train-router", grown, "--only", "one", data)
    assert "no rows for 'new'" in refused(
        "train-router", grown, "--only", "new", f"--data=one={files['one']}"
    )
    assert "leave out" in refused("train-router", grown, "--only", "new", data, "--kind", "taps")
    assert run("attach-router", grown, "--kind", "uniform", "--force").exit_code == 0
    assert "uniform router" in refused("train-router", grown, "--only", "new", data)
