"""Training a LoRA on a tiny base: it learns, repeats bit for bit, resumes, writes a plain PEFT folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from molora_cli.core.training.adapter_job import (
    AdapterJob,
    plan_jobs,
    settings_from,
    split_held_out,
    train_job,
)
from molora_cli.core.training.adapter_loop import AdapterTrainer, TrainSettings, plan_batches, start_from
from molora_cli.core.training.data import Example, Message
from molora_cli.core.training.encode import encode_all
from molora_cli.errors import InputError

BASE_ID = "someone/tiny-llama"
SETTINGS = TrainSettings(rank=2, alpha=4, tokens=3000, lr=0.02, warmup=2, batch_tokens=400, max_length=64)


def rows(n: int = 40) -> list[dict[str, Any]]:
    return [
        {
            "messages": [
                {"role": "user", "content": f"number {i}"},
                {"role": "assistant", "content": "yes yes yes"},
            ]
        }
        for i in range(n)
    ]


@pytest.fixture
def base(tiny_llama: Path) -> SimpleNamespace:
    return SimpleNamespace(path=tiny_llama, id=BASE_ID)


@pytest.fixture
def job(tmp_path: Path) -> AdapterJob:
    path = tmp_path / "say.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in rows()), encoding="utf-8")
    return AdapterJob("say", path, source="Made up for a test, CC0.", licence="cc0-1.0")


def trainer(tiny_llama: Path, settings: TrainSettings = SETTINGS, init: Path | None = None) -> AdapterTrainer:
    from transformers import AutoModelForCausalLM

    return AdapterTrainer(AutoModelForCausalLM.from_pretrained(tiny_llama), settings, 0, init)


def encoded(tiny_llama: Path, n: int = 6) -> list[Any]:
    from transformers import AutoTokenizer

    examples = [
        Example((Message("user", "q" * (1 + 3 * i)), Message("assistant", "a" * (2 + i))), None, None, i)
        for i in range(n)
    ]
    return encode_all(AutoTokenizer.from_pretrained(tiny_llama), examples, 64)


def test_measures_on_the_way_are_written_and_change_nothing(
    base: SimpleNamespace, job: AdapterJob, tmp_path: Path
) -> None:
    plain = train_job(job, base, SETTINGS, tmp_path / "plain")
    watched = train_job(job, base, SETTINGS, tmp_path / "watched", val_every=2)
    lines = [json.loads(x) for x in (tmp_path / "watched/say/metrics.jsonl").read_text().splitlines()]
    points = {m["step"]: m["nll"] for m in lines if "nll" in m}
    assert sorted(points) == list(range(2, plain["steps"] + 1, 2))
    assert points[max(points)] < points[2] and watched["nll"] == plain["nll"]


def test_trains_and_writes_a_folder_that_peft_opens(
    base: SimpleNamespace, job: AdapterJob, tmp_path: Path, tiny_llama: Path
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    ticks: list[float] = []
    result = train_job(job, base, SETTINGS, tmp_path / "out", ticker=lambda done, *_: ticks.append(done))
    folder = tmp_path / "out" / "say"
    assert sorted(p.name for p in folder.iterdir()) == [
        "README.md",
        "adapter_config.json",
        "adapter_model.safetensors",
        "metrics.jsonl",
    ]
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["say"]
    assert result["nll"] < 0.5 * result["nll_base"]
    assert ticks == list(range(1, result["steps"] + 1))
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [m["step"] for m in metrics] == ticks and metrics[-1]["loss"] < metrics[0]["loss"]
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == BASE_ID and config["r"] == 2 and config["lora_alpha"] == 4
    tensors = load_file(folder / "adapter_model.safetensors")
    assert {t.dtype for t in tensors.values()} == {torch.bfloat16}
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_llama), folder)
    again = trainer(tiny_llama)
    again.model = model
    kept = encoded(tiny_llama)
    assert again.nll(kept) != pytest.approx(again.nll(kept, adapter=False), abs=1e-3)


def test_the_card_says_where_it_comes_from_and_names_no_folder(
    base: SimpleNamespace, job: AdapterJob, tmp_path: Path
) -> None:
    import hashlib

    train_job(job, base, replace(SETTINGS, tokens=500), tmp_path / "out")
    card = (tmp_path / "out" / "say" / "README.md").read_text()
    assert hashlib.sha256(job.data.read_bytes()).hexdigest() in card
    assert "Made up for a test, CC0." in card and "molora train-adapter say=say.jsonl" in card
    assert f'base_model: "{BASE_ID}"\nlicense: "cc0-1.0"' in card and "--rank 2" in card
    for path in (tmp_path / "out" / "say").iterdir():
        assert str(tmp_path).encode() not in path.read_bytes()
        assert str(base.path).encode() not in path.read_bytes()


def test_the_same_seed_gives_the_same_bytes_and_another_does_not(
    base: SimpleNamespace, job: AdapterJob, tmp_path: Path
) -> None:
    short = replace(SETTINGS, tokens=1200)
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        train_job(job, base, replace(short, seed=seed), tmp_path / name)
    a, b, c = ((tmp_path / n / "say" / "adapter_model.safetensors").read_bytes() for n in "abc")
    assert a == b and a != c


def test_an_interrupted_run_goes_on_to_the_same_bytes(
    base: SimpleNamespace, job: AdapterJob, tmp_path: Path
) -> None:
    def stop(done: float, total: float | None = None, note: str = "") -> None:
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_job(job, base, SETTINGS, tmp_path / "stopped", ticker=stop)
    assert not (tmp_path / "stopped" / "say").exists()
    seen: list[float] = []
    train_job(job, base, SETTINGS, tmp_path / "stopped", ticker=lambda done, *_: seen.append(done))
    train_job(job, base, SETTINGS, tmp_path / "whole")
    assert seen[0] == 4
    stopped, whole = (tmp_path / n / "say" for n in ("stopped", "whole"))
    name = "adapter_model.safetensors"
    assert (stopped / name).read_bytes() == (whole / name).read_bytes()
    assert len((stopped / "metrics.jsonl").read_text().splitlines()) == len(
        (whole / "metrics.jsonl").read_text().splitlines()
    )


def test_other_settings_start_afresh(base: SimpleNamespace, job: AdapterJob, tmp_path: Path) -> None:
    def stop(done: float, total: float | None = None, note: str = "") -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_job(job, base, SETTINGS, tmp_path / "out", ticker=stop)
    seen: list[float] = []
    other = replace(SETTINGS, tokens=800, lr=0.01)
    train_job(job, base, other, tmp_path / "out", ticker=lambda done, *_: seen.append(done))
    assert seen[0] == 1


def test_an_existing_folder_is_kept_without_force(
    base: SimpleNamespace, job: AdapterJob, tmp_path: Path
) -> None:
    short = replace(SETTINGS, tokens=200)
    train_job(job, base, short, tmp_path / "out")
    with pytest.raises(InputError):
        train_job(job, base, short, tmp_path / "out")
    train_job(job, base, short, tmp_path / "out", force=True)


def test_losses_equal_transformers_and_ignore_padding(tiny_llama: Path) -> None:
    """The batch's losses, with the head on completion positions only, against one unpadded row at a time."""
    tuned = trainer(tiny_llama)
    batch = encoded(tiny_llama)
    got = tuned.losses(batch)
    expected = []
    for row in batch:
        ids = torch.tensor([row.ids])
        with torch.no_grad():
            logits = tuned.model(input_ids=ids).logits[0].double()
        for t in range(1, len(row.ids)):
            if row.completion[t]:
                expected.append(-logits[t - 1].log_softmax(-1)[row.ids[t]])
    assert len(got) == len(expected) == sum(sum(r.completion) for r in batch)
    torch.testing.assert_close(got.double(), torch.stack(expected), atol=1e-4, rtol=0)


def test_only_the_adapter_changes(tiny_llama: Path) -> None:
    tuned = trainer(tiny_llama)
    before = {n: p.clone() for n, p in tuned.model.named_parameters()}
    for _ in range(2):
        tuned.train_step(encoded(tiny_llama), 10)
    changed = {n for n, p in tuned.model.named_parameters() if not torch.equal(p, before[n])}
    assert changed and all("lora_" in n for n in changed)
    assert changed == set(tuned.parameters)


def test_the_start_is_the_best_cut(
    tiny_llama: Path, make_adapter: Callable[..., Path], tmp_path: Path
) -> None:
    """Same deltas at the same rank; at a lower rank the error is the singular values left out."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    source = make_adapter(tiny_llama, "wide", r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"])
    full = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_llama), source)
    for rank in (4, 2, 8):
        settings = replace(SETTINGS, rank=rank, alpha=3.0, target=("q_proj", "down_proj"))
        cut = trainer(tiny_llama, settings, source)
        for (name, a), (_, b) in zip(deltas(full).items(), deltas(cut.model).items(), strict=True):
            left_out = torch.linalg.svdvals(a)[rank:].square().sum().sqrt()
            torch.testing.assert_close((a - b).norm(), left_out, atol=1e-5, rtol=1e-4, msg=name)
        assert list(cut.model.peft_config) == ["default"]


def deltas(model: Any) -> dict[str, torch.Tensor]:
    from peft.tuners.lora import LoraLayer

    return {
        n: m.get_delta_weight("default").detach()
        for n, m in model.named_modules()
        if isinstance(m, LoraLayer)
    }


def test_a_start_of_other_modules_is_refused(tiny_llama: Path, make_adapter: Callable[..., Path]) -> None:
    source = make_adapter(tiny_llama, "few", r=4)
    with pytest.raises(InputError, match="targets other modules"):
        trainer(tiny_llama, SETTINGS, source)
    with pytest.raises(InputError, match="DoRA"):
        start_from(trainer(tiny_llama).model, make_adapter(tiny_llama, "dora", use_dora=True))


def test_unknown_modules_are_refused(tiny_llama: Path) -> None:
    with pytest.raises(InputError, match="no modules named"):
        trainer(tiny_llama, replace(SETTINGS, target=("qkv",)))


def test_batches_hold_every_row_once_and_fit(tiny_llama: Path) -> None:
    lengths = [5 + (7 * i) % 90 for i in range(200)]
    plan = plan_batches(lengths, replace(SETTINGS, epochs=1.0, batch_tokens=300))
    assert sorted(i for batch in plan for i in batch) == list(range(200))
    assert all(max(lengths[i] for i in b) * len(b) <= 300 for b in plan)
    padded = sum(max(lengths[i] for i in b) * len(b) for b in plan)
    assert padded < 1.15 * sum(lengths)
    assert plan == plan_batches(lengths, replace(SETTINGS, epochs=1.0, batch_tokens=300))
    by_tokens = plan_batches(lengths, replace(SETTINGS, tokens=1000, batch_tokens=300))
    assert 1000 <= sum(lengths[i] for b in by_tokens for i in b) < 1300
    assert plan_batches([500], replace(SETTINGS, tokens=1, batch_tokens=300)) == [[0]]


def test_held_out_rows_share_no_document() -> None:
    examples = [
        Example((), f"t{i % 50}", None, i, document=f"d{i // 4}" if i % 2 else None) for i in range(400)
    ]
    train, kept = split_held_out(examples, seed=0)
    assert 10 <= len(kept) <= 20 and len(train) + len(kept) == 400
    key = lambda e: e.document or e.contents[0]  # noqa: E731
    assert not {key(e) for e in train} & {key(e) for e in kept}


@pytest.mark.parametrize(
    "values",
    [{"rank": 0}, {"lr": 0.0}, {"lr": -1.0}, {"lr": float("nan")}, {"epochs": -1.0}, {"save_dtype": "int8"}],
)
def test_settings_out_of_range_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        settings_from(values)


def test_settings_defaults() -> None:
    settings = settings_from({"rank": 8, "target": "q_proj, v_proj", "alpha": 0.0, "epochs": 0.0})
    assert settings.alpha == 16 and settings.target == ("q_proj", "v_proj") and settings.epochs is None


def test_jobs_are_checked_before_any_training(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n')
    with pytest.raises(InputError, match="no data"):
        plan_jobs({}, held_out={}, init={}, source={}, licence={})
    with pytest.raises(InputError, match="no file"):
        plan_jobs({"a": tmp_path / "b.jsonl"}, held_out={}, init={}, source={}, licence={})
    with pytest.raises(InputError, match="no data is given for b"):
        plan_jobs({"a": path}, held_out={"b": path}, init={}, source={}, licence={})


def test_rows_without_completion_are_refused(base: SimpleNamespace, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "a"}]}\n')
    with pytest.raises(InputError, match="nothing to learn"):
        train_job(AdapterJob("a", path), base, SETTINGS, tmp_path / "out")


def test_command_with_recipe(tiny_llama: Path, job: AdapterJob, tmp_path: Path) -> None:
    from molora_cli.app import app

    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "train-adapter:\n  rank: 3\n  tokens: 300\n  batch_tokens: 200\n  data: {say: say.jsonl}\n"
    )
    arguments = [
        "train-adapter",
        "--recipe",
        str(recipe),
        "--base",
        str(tiny_llama),
        "-o",
        str(tmp_path / "out"),
    ]
    run = CliRunner().invoke(app, [*arguments, "--rank", "2", "--json"])
    assert run.exception is None, run.output
    document = json.loads(run.stdout)
    assert document["adapters"][0]["name"] == "say" and document["adapters"][0]["nll"] is not None
    config = json.loads((tmp_path / "out" / "say" / "adapter_config.json").read_text())
    assert config["r"] == 2 and config["lora_alpha"] == 4
