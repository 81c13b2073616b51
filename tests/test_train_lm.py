"""Heads of live routers tuned through the language-model loss."""

from __future__ import annotations

import json
import random
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from molora_cli.app import app
from molora_cli.core.adapter.factors import Factors
from molora_cli.core.router.files import stage_tensors
from molora_cli.core.router.spec import RouterSpec
from molora_cli.core.training.data import Example, Message
from molora_cli.core.training.heads import HeadSettings
from molora_cli.core.training.live_job import LiveSettings, train_live
from molora_cli.core.training.lm_job import tune_router
from molora_cli.core.training.lm_loop import LM_CHECKPOINT, LmSettings, Logits
from molora_cli.core.training.lm_rows import counted, draw_step, loss_pool, token_losses
from molora_cli.core.training.router_loop import Interrupted, train_context
from molora_cli.core.training.router_rows import MIXED, RouterRows, RouterSettings, TokenRow, prepare
from molora_cli.errors import InputError

NAMES = ("num", "low", "up")
WORDS = {"num": "0123456789", "low": "abcdefghij", "up": "ABCDEFGHIJ"}
SETTINGS = RouterSettings(
    steps=10, every=10, batch=6, mixes=24, max_length=96, val_share=0.2, projection=16, hidden=16
)
LIVE = LiveSettings(taps=(1, 2), rows=4, mixes=4, heads=HeadSettings(steps=10, batch=64))
TUNING = LmSettings(steps=12, tokens=200, forward_tokens=128, lr=1e-2, every=4, sharp=0.5, held_out=2)


def _chats(name: str, count: int = 10) -> list[Example]:
    rng = random.Random(name)

    def word() -> str:
        return "".join(rng.choice(WORDS[name]) for _ in range(rng.randint(6, 16)))

    turns = [(Message("user", word()), Message("assistant", word())) for _ in range(count)]
    return [Example(pair, None, None, i + 1) for i, pair in enumerate(turns)]


@pytest.fixture(scope="module")
def rows(tiny_llama: Path) -> RouterRows:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    return prepare({name: _chats(name) for name in NAMES}, tokenizer, SETTINGS)


@pytest.fixture(scope="module")
def model(tiny_llama: Path) -> Any:
    from transformers import AutoModelForCausalLM

    from molora_cli import RoutedModel

    base = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(2)

    def factors() -> Factors:
        return Factors(
            torch.randn(2, 64, generator=generator) / 4, torch.randn(64, 2, generator=generator) / 2, 1.0
        )

    paths = [f"model.layers.{i}.self_attn.{p}" for i in range(4) for p in ("q_proj", "o_proj")]
    return RoutedModel.from_parts(base, {name: {p: factors() for p in paths} for name in NAMES})


@pytest.fixture(scope="module")
def starts(model: Any, rows: RouterRows) -> dict[str, tuple[RouterSpec, dict[str, Tensor]]]:
    made = train_context(rows, model.base.get_input_embeddings().weight.detach(), SETTINGS)
    context = (made.spec, made.tensors)
    return {
        "context+taps": train_live("context+taps", model, rows, SETTINGS, LIVE, context=context),
        "taps": train_live("taps", model, rows, SETTINGS, LIVE),
        "layer": train_live("layer", model, rows, SETTINGS, replace(LIVE, taps=None)),
    }


@pytest.mark.parametrize("kind", ["context+taps", "taps", "layer"])
def test_the_loss_falls_and_only_heads_change(
    model: Any, rows: RouterRows, starts: dict[str, Any], kind: str
) -> None:
    spec, tensors = starts[kind]
    frozen = {name: value.clone() for name, value in model.base.state_dict().items()}
    lines: list[dict[str, Any]] = []
    (made, found), tuned = tune_router(kind, model, rows, (spec, tensors), TUNING, record=lines.append)
    assert tuned.steps == 12 and tuned.tokens >= 12 * TUNING.tokens
    assert tuned.start is not None and tuned.best is not None and tuned.best < tuned.start - 1e-3
    assert all(torch.equal(value, frozen[name]) for name, value in model.base.state_dict().items())
    last = len(spec.stages) - 1
    changed = {name for name in tensors if not torch.equal(tensors[name], found[name])}
    assert changed and all(name.startswith(f"stages.{last}.taps.") for name in changed)
    heads = {name.split(".")[1] for name in stage_tensors(found, last)}
    assert {name.split(".")[3] for name in changed} == heads, "every head learns"
    assert made.stages == spec.stages and made.training["lm"]["settings"]["steps"] == 12
    assert [line["step"] for line in lines] == list(range(13)) and json.dumps(lines)
    router = model.router
    assert router.k == 1 and router.temperature is None and not router.differentiable
    assert not any(p.requires_grad for p in router.live[0].parameters())
    # the best heads are in place: the held-out NLL is measured as the router runs
    again = tune_router(kind, model, rows, (made, found), replace(TUNING, steps=1, lr=1e-12))[1]
    assert again.start == pytest.approx(tuned.best, rel=1e-5)


def test_a_resumed_run_ends_as_the_uninterrupted_one(
    model: Any, rows: RouterRows, starts: dict[str, Any], tmp_path: Path
) -> None:
    start = starts["taps"]
    whole = tune_router("taps", model, rows, start, TUNING)
    same = tune_router("taps", model, rows, start, TUNING)

    def stop(line: dict[str, Any]) -> None:
        if line["step"] == 6:  # between two measurements
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(Interrupted, match="step 6 of 12"):
        tune_router("taps", model, rows, start, TUNING, work=tmp_path, record=stop)
    assert (tmp_path / LM_CHECKPOINT).is_file()
    other = replace(TUNING, seed=1)
    with pytest.raises(InputError, match="other data or settings"):
        tune_router("taps", model, rows, start, other, work=tmp_path, resume=True)
    resumed = tune_router("taps", model, rows, start, TUNING, work=tmp_path, resume=True)
    assert not (tmp_path / LM_CHECKPOINT).is_file()
    for found in (same, resumed):
        assert all(torch.equal(value, found[0][1][name]) for name, value in whole[0][1].items())
        assert (found[1].best, found[1].best_step) == (whole[1].best, whole[1].best_step)
    different = tune_router("taps", model, rows, start, other)[0][1]
    assert not all(torch.equal(value, different[name]) for name, value in whole[0][1].items())


def test_it_stops_early_and_keeps_the_start_where_nothing_is_gained(
    model: Any, rows: RouterRows, starts: dict[str, Any]
) -> None:
    spec, tensors = starts["taps"]
    settings = replace(TUNING, steps=40, lr=30.0, every=1, patience=2)
    (_, found), tuned = tune_router("taps", model, rows, (spec, tensors), settings)
    if tuned.best_step == 0:
        assert tuned.stopped_early and tuned.steps == 2
        assert all(torch.equal(value, found[name]) for name, value in tensors.items())
    assert tuned.best is not None and tuned.start is not None and tuned.best <= tuned.start


def test_the_balance_loss_spreads_the_gates(model: Any, rows: RouterRows, starts: dict[str, Any]) -> None:
    # without rows held out the last heads are kept
    nothing_held_out = replace(rows, held_out={})

    def imbalance(balance: float) -> float:
        settings = replace(TUNING, steps=6, balance=balance)
        tune_router("taps", model, nothing_held_out, starts["taps"], settings)
        logits = Logits(list(model.router.live[0].heads))
        with torch.no_grad():
            _, real = token_losses(model, rows.train[MIXED][:4])
        found = float(logits.losses(real)[0])
        logits.remove()
        return found

    assert imbalance(5.0) < imbalance(0.0)


def test_the_losses_are_their_formulas() -> None:
    head = torch.nn.Identity()
    logits = Logits([head])
    z = torch.tensor([[[2.0, 0.0], [1.0, 0.0], [0.0, 3.0], [9.0, 9.0]]])
    head(z)
    balance, square = logits.losses(torch.tensor([[True, True, True, False]]))
    p = z[0, :3].softmax(-1).mean(0)
    assert float(balance) == pytest.approx(float(2 * (2 / 3 * p[0] + 1 / 3 * p[1])), rel=1e-6)
    assert float(square) == pytest.approx(float(z[0, :3].logsumexp(-1).square().mean()), rel=1e-6)
    assert logits.seen == []


def test_rows_of_a_step(rows: RouterRows) -> None:
    pool = loss_pool(rows, 96)
    assert set(pool) == {*NAMES, MIXED}
    first = draw_step(pool, TUNING, 3)
    assert [r.ids.tolist() for r in first] == [r.ids.tolist() for r in draw_step(pool, TUNING, 3)]
    assert sum(len(r.ids) for r in first[:-1]) < TUNING.tokens <= sum(len(r.ids) for r in first)
    drawn = [row for step in range(200) for row in draw_step(pool, TUNING, step)]
    share = sum(any(row is mix for mix in pool[MIXED]) for row in drawn) / len(drawn)
    assert 0.4 < share < 0.6
    row = TokenRow(
        torch.arange(6), torch.tensor([0, 0, -1, 0, -1, 1]), torch.tensor([1, 0, 1, 1, 1, 1]).bool()
    )
    assert counted(row).tolist() == [False, False, False, True, False, True]
    cut = loss_pool(rows, 40)
    assert all(len(r.ids) <= 40 for group in cut.values() for r in group)
    questions = {
        n: [TokenRow(r.ids, r.labels, torch.zeros_like(r.completion)) for r in g]
        for n, g in rows.train.items()
    }
    with pytest.raises(InputError, match="no row has an answer"):
        loss_pool(replace(rows, train=questions), 96)


def test_the_loss_is_that_of_each_row_alone(model: Any, rows: RouterRows, starts: dict[str, Any]) -> None:
    tune_router("taps", model, rows, starts["taps"], replace(TUNING, steps=1))
    some = [*rows.train["num"][:2], rows.train[MIXED][0]]
    with torch.no_grad():
        together, _ = token_losses(model, some)
        alone = torch.cat([token_losses(model, [row])[0] for row in some])
        row = some[2]
        logits = model(row.ids.unsqueeze(0)).logits[0]
    assert torch.allclose(together, alone, atol=1e-4)
    wanted = counted(row)
    plain = torch.nn.functional.cross_entropy(logits[:-1], row.ids[1:], reduction="none")[wanted[1:]]
    assert torch.allclose(alone[-int(wanted.sum()) :], plain, atol=1e-4)


def test_the_command(tiny_llama: Path, make_adapter: Callable[..., Path], tmp_path: Path) -> None:
    def run(*line: object) -> Any:
        done = CliRunner().invoke(app, [str(part) for part in line])
        if done.exit_code and isinstance(done.exception, Exception):
            raise done.exception
        return done

    bundle, data, metrics = tmp_path / "b", tmp_path / "rows.jsonl", tmp_path / "m.jsonl"
    adapters = [f"{n}={make_adapter(tiny_llama, n, seed=i)}" for i, n in enumerate(NAMES)]
    run("compose", "-o", bundle, "--base", tiny_llama, *adapters)
    chats = [
        {"messages": [{"role": m.role, "content": m.content} for m in row.messages], "label": n}
        for n in NAMES
        for row in _chats(n)
    ]
    data.write_text("".join(json.dumps(row) + "\n" for row in chats))
    line = ("train-router", bundle, "--data", data, "--json", "--rows", 10, "--mixes", 10, "--steps", 10)
    tuned = (*line, "--kind", "context+taps", "--taps", "2", "--loss", "lm", "--lm-steps", 2)
    made = json.loads(run(*tuned, "--metrics", metrics).stdout)
    assert made["kind"] == "context+taps" and made["loss"] == "lm" and made["lm"]["steps"] == 2
    steps = [json.loads(text) for text in metrics.read_text().splitlines()]
    assert [s["step"] for s in steps if s.get("loss_of") == "lm"] == [0, 1, 2]
    assert sum("accuracy" in s for s in steps) == 1, "context was trained first"
    # the router that is there is the start: no labels are learnt again
    again = json.loads(run(*tuned, "--metrics", metrics, "--force").stdout)
    assert again["lm"]["start"] == pytest.approx(made["lm"]["best"], rel=1e-5)
    for bad, message in (
        (("--kind", "hidden", "--loss", "lm"), "'hidden' is not trained through"),
        (("--kind", "taps", "--loss", "x"), "no loss 'x'"),
        (("--kind", "taps", "--loss", "lm", "--head", "lda"), "closed form"),
        (("--kind", "taps", "--loss", "lm", "--balance", "-1"), "balance is -1.0"),
    ):
        with pytest.raises(InputError, match=message):
            run(*line, *bad, "--force")


@pytest.mark.slow
def test_two_processes_take_the_steps_of_one(
    tiny_llama: Path, make_adapter: Callable[..., Path], tmp_path: Path
) -> None:
    import shutil
    import subprocess
    import sys

    from molora_cli.core.router.files import load_tensors

    adapters = [f"{n}={make_adapter(tiny_llama, n, seed=i)}" for i, n in enumerate(NAMES)]
    one, two = tmp_path / "one", tmp_path / "two"
    done = CliRunner().invoke(app, ["compose", "-o", str(one), "--base", str(tiny_llama), *adapters])
    assert done.exit_code == 0
    shutil.copytree(one, two)
    data = tmp_path / "rows.jsonl"
    with data.open("w") as file:
        for name in NAMES:
            for row in _chats(name):
                turns = [{"role": m.role, "content": m.content} for m in row.messages]
                file.write(json.dumps({"messages": turns, "label": name}) + "\n")
    options = ["--data", str(data), "--kind", "taps", "--taps", "1,2", "--loss", "lm", "--lm-steps", "6"]
    options += ["--rows", "10", "--mixes", "20", "--json"]
    launch = ["accelerate.commands.launch", "--cpu", "--num_processes", "2", "--num_machines", "1"]
    launch += ["--mixed_precision", "no", "--dynamo_backend", "no", "-m", "molora_cli"]
    found = {}
    for folder, prefix in ((one, ["molora_cli"]), (two, launch)):
        command = [sys.executable, "-m", *prefix, "train-router", str(folder), *options]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=280)
        assert ran.returncode == 0, ran.stderr[-2000:]
        found[folder] = json.loads(ran.stdout)
    assert found[two]["lm"]["best"] == pytest.approx(found[one]["lm"]["best"], rel=1e-5)
    first, second = (load_tensors(folder / "router.safetensors") for folder in (one, two))
    assert first.keys() == second.keys() and found[one]["lm"]["best_step"] > 0
    for name, tensor in first.items():
        torch.testing.assert_close(second[name], tensor, rtol=1e-3, atol=1e-4)
