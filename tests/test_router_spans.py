"""What a context router remembers of a conversation's parts, and its network that looks ahead."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from molora_cli.app import app
from molora_cli.core.base.embedding import read_embedding
from molora_cli.core.router.columns import drop_expert
from molora_cli.core.router.context import ContextStage
from molora_cli.core.router.files import load_tensors, stage_tensors
from molora_cli.core.router.kinds import Surroundings
from molora_cli.core.router.spans import DECAY, LEAST, remember, start_spans
from molora_cli.core.router.spec import RouterSpec, read_spec
from molora_cli.core.training.data import Example, Message, Segment
from molora_cli.core.training.encode import encode_all
from molora_cli.core.training.router_loop import train_context
from molora_cli.core.training.router_rows import MIXED, AheadSettings, RouterSettings, prepare, token_row
from molora_cli.errors import InputError
from molora_cli.out import no_ticks

WORDS = {"num": "0123456789", "low": "abcdefghij"}
NAMES = tuple(WORDS)


def twin(p: Tensor, own: Tensor, cuts: Tensor) -> Tensor:
    """One row, a token at a time: (T, P + 5 E)."""
    rows = []
    span: list[int] = []
    last, opening, fresh = (
        torch.zeros(3 * p.shape[1], dtype=p.dtype),
        torch.zeros(own.shape[1], dtype=p.dtype),
        True,
    )

    def ends() -> Tensor:
        weights = torch.tensor([DECAY**i for i in range(len(span))], dtype=p.dtype)
        mean = p[span].mean(0)
        return torch.cat([mean, (p[span] * weights[:, None]).sum(0) / weights.sum(), p[span[-1]]])

    for t in range(len(p)):
        if cuts[t]:
            if len(span) >= LEAST:
                last = ends()
            span, fresh, opening = [], True, torch.zeros_like(opening)
        elif fresh:
            opening, fresh = own[t], False
        span.append(t)
        rows.append(torch.cat([opening, ends()[: 2 * p.shape[1]], last]))
    return torch.stack(rows)


@pytest.fixture
def drawn() -> tuple[Tensor, Tensor, Tensor]:
    rng = torch.Generator().manual_seed(0)
    p = torch.rand(3, 90, 4, generator=rng, dtype=torch.float64).softmax(-1)
    own = torch.randn(3, 90, 5, generator=rng, dtype=torch.float64)
    cuts = torch.rand(3, 90, generator=rng) < 0.08
    cuts[1, :20], cuts[2] = False, False
    cuts[0, :3] = True
    return p, own, cuts


def fresh(batch: int) -> dict[str, Tensor]:
    return start_spans(batch, 4, 5, dtype=torch.float64, device=torch.device("cpu"))


def test_it_is_what_a_loop_over_tokens_gives(drawn: tuple[Tensor, Tensor, Tensor]) -> None:
    p, own, cuts = drawn
    found, _ = remember(p, own, cuts, None, fresh(3))
    for row in range(3):
        torch.testing.assert_close(found[row], twin(p[row], own[row], cuts[row]), rtol=0, atol=1e-12)


@pytest.mark.parametrize("size", [1, 7, 40])
def test_blocks_with_the_state_carried_over(drawn: tuple[Tensor, Tensor, Tensor], size: int) -> None:
    p, own, cuts = drawn
    whole, end = remember(p, own, cuts, None, fresh(3))
    state, parts = fresh(3), []
    for first in range(0, 90, size):
        here = slice(first, first + size)
        found, state = remember(p[:, here], own[:, here], cuts[:, here], None, state)
        parts.append(found)
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=0, atol=1e-12)
    for name, value in end.items():
        torch.testing.assert_close(state[name], value, rtol=0, atol=1e-12)


def test_padding_changes_nothing(drawn: tuple[Tensor, Tensor, Tensor]) -> None:
    p, own, cuts = drawn
    rng = torch.Generator().manual_seed(1)
    mask = torch.rand(3, 90, generator=rng) < 0.7
    mask[2] = False
    poisoned = p.masked_fill(~mask.unsqueeze(-1), 0.5)
    found, after = remember(poisoned, own, cuts | ~mask, mask, fresh(3))
    assert bool(torch.isfinite(found).all())
    for row in range(2):
        keep = mask[row]
        alone, end = remember(
            p[row : row + 1, keep], own[row : row + 1, keep], cuts[row : row + 1, keep], None, fresh(1)
        )
        torch.testing.assert_close(found[row, keep], alone[0], rtol=0, atol=1e-12)
        for name, value in end.items():
            torch.testing.assert_close(after[name][row], value[0], rtol=0, atol=1e-12)
    assert all(torch.equal(after[name][2], value[0]) for name, value in fresh(1).items())


def test_labels_that_look_ahead(tiny_llama: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    question, reply = "12 ab", "1. 34\n2. cd"
    segments = [
        Segment(0, 0, 2, "num"),
        Segment(0, 3, 5, "low"),
        Segment(1, 3, 5, "num"),
        Segment(1, 9, 11, "low"),
    ]
    chat = Example((Message("user", question), Message("assistant", reply)), None, None, 1, tuple(segments))
    encoded = encode_all(tokenizer, [chat], 512, no_ticks)[0]
    row = token_row(encoded, chat, NAMES)
    assert row.lead is not None
    shown = {}
    for t, message in enumerate(encoded.message):
        where = "template" if message < 0 else (question, reply)[message][encoded.start[t] : encoded.end[t]]
        shown.setdefault((message, where, int(row.labels[t])), set()).add(
            (int(row.led[t]), bool(row.lead[t]))
        )
    # the header of the answer leads to its first part, "1. " too, and "\n2. " to the second
    assert shown[(-1, "template", 1)] >= {(0, True)}
    assert shown[(1, "1", -1)] == {(0, True)} and shown[(1, "2", -1)] == {(1, True)}
    assert shown[(1, "3", 0)] == {(0, False)} and shown[(1, "d", 1)] == {(1, False)}
    assert shown[(0, "a", 1)] == {(1, False)}
    parts = Example(
        (Message("user", "?"), Message("assistant", "34cd")),
        None,
        None,
        1,
        (Segment(1, 0, 2, "num"), Segment(1, 2, 4, "low")),
    )
    encoded = encode_all(tokenizer, [parts], 512, no_ticks)[0]
    row = token_row(encoded, parts, NAMES)
    at = next(t for t, m in enumerate(encoded.message) if m == 1 and encoded.end[t] == 2)
    # nothing joins them: the last token before the second part
    assert int(row.labels[at]) == 0 and int(row.led[at]) == 1


def _chats(name: str, count: int = 24) -> list[Example]:
    rng = random.Random(name)

    def word() -> str:
        return "".join(rng.choice(WORDS[name]) for _ in range(rng.randint(12, 40)))

    return [
        Example((Message("user", word()), Message("assistant", word())), None, None, i + 1)
        for i in range(count)
    ]


@pytest.fixture(scope="module")
def trained(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A router file with a network that looks ahead."""
    from transformers import AutoTokenizer

    from molora_cli.core.router.files import save

    settings = RouterSettings(
        steps=300, batch=8, mixes=400, max_length=256, projection=16, hidden=16,
        ahead=AheadSettings(units=32, steps=600, batch=1024, lr=1e-2),
    )  # fmt: skip
    rows = prepare({n: _chats(n) for n in NAMES}, AutoTokenizer.from_pretrained(tiny_llama), settings)
    made = train_context(rows, read_embedding(tiny_llama), settings)
    file = tmp_path_factory.mktemp("ahead") / "router.safetensors"
    save(file, made.spec, made.tensors)
    return file


def _stage(file: Path, base: Path, change: Callable[[RouterSpec], Any] = lambda spec: None) -> ContextStage:
    spec = read_spec(file)
    change(spec)
    around = Surroundings(n_layers=1, embedding=read_embedding(base))
    return ContextStage(spec.stages[0], stage_tensors(load_tensors(file), 0), around)


def test_it_finds_the_part_that_comes_next(trained: Path, tiny_llama: Path) -> None:
    """Tokens of rows it never saw whose part is not that of the token before: without the look ahead hardly
    any of them takes its adapter."""
    from transformers import AutoTokenizer

    whole = _stage(trained, tiny_llama)
    spec = read_spec(trained).stages[0]
    spec.params.pop("ahead")
    plain = ContextStage(spec, stage_tensors(load_tensors(trained), 0), whole.around)
    settings = RouterSettings(mixes=80, max_length=256, seed=7)
    rows = prepare({n: _chats(n) for n in NAMES}, AutoTokenizer.from_pretrained(tiny_llama), settings)
    right, total = {"whole": 0, "plain": 0}, 0
    for row in rows.train[MIXED]:
        assert row.lead is not None
        before = torch.cat([row.led[:1], row.led[:-1]])
        turn = (row.lead & (before != row.led) & (before >= 0)).nonzero()[:, 0].tolist()
        total += len(turn)
        for name, stage in (("whole", whole), ("plain", plain)):
            ids = row.ids.unsqueeze(0)
            scores, _ = stage.score(ids, torch.ones_like(ids).bool(), stage.start(1))
            best = scores.logp[0, :, 0].argmax(-1)
            right[name] += sum(int(best[t] == row.led[t]) for t in turn)
    assert total > 40 and right["whole"] > 0.25 * total > 5 * right["plain"], (right, total)


def test_routes_do_not_depend_on_blocks_or_padding(trained: Path, tiny_llama: Path) -> None:
    stage = _stage(trained, tiny_llama)
    ids = torch.randint(0, 100, (2, 50), generator=torch.Generator().manual_seed(0))
    whole, _ = stage.score(ids, torch.ones_like(ids).bool(), stage.start(2))
    state, parts = stage.start(2), []
    for first, end in ((0, 1), (1, 30), (30, 50)):
        scores, state = stage.score(ids[:, first:end], torch.ones(2, end - first).bool(), state)
        parts.append(scores.logp)
    torch.testing.assert_close(torch.cat(parts, 1), whole.logp, rtol=0, atol=1e-9)
    padded = torch.cat([torch.zeros(2, 6, dtype=torch.int64), ids], 1)
    mask = torch.arange(56).expand(2, 56) >= 6
    left, _ = stage.score(padded, mask, stage.start(2))
    torch.testing.assert_close(left.logp[:, 6:], whole.logp, rtol=0, atol=1e-9)


def test_an_expert_is_taken_out_of_it_too(trained: Path, tiny_llama: Path) -> None:
    spec, tensors, _ = drop_expert(read_spec(trained), load_tensors(trained), "num", force=False)
    own = stage_tensors(tensors, 0)
    stage = ContextStage(spec.stages[0], own, Surroundings(n_layers=1, embedding=read_embedding(tiny_llama)))
    ids = torch.randint(0, 100, (1, 20), generator=torch.Generator().manual_seed(0))
    assert stage.score(ids, torch.ones_like(ids).bool(), stage.start(1))[0].logp.shape[-1] == 1
    before = stage_tensors(load_tensors(trained), 0)
    assert torch.equal(own["ahead.outer.weight"], before["ahead.outer.weight"][1:])


def test_headers_are_checked(trained: Path, tiny_llama: Path) -> None:
    def set_ahead(value: Any) -> Callable[[RouterSpec], None]:
        return lambda spec: spec.stages[0].params.update(ahead=value)

    for value in ({"units": 10**9, "cuts": []}, {"units": -1, "cuts": []}, "x", {"units": 4, "cuts": ["a"]}):
        with pytest.raises(InputError, match="header"):
            _stage(trained, tiny_llama, set_ahead(value))


def test_the_command_keeps_it(tiny_llama: Path, pair: Path, tmp_path: Path) -> None:
    """A router from train-router looks ahead, and chat-shaped text runs through it."""
    files = []
    for bundle_name, name in (("one", "num"), ("two", "low")):
        files.append(f"--data={bundle_name}={tmp_path / name}.jsonl")
        turns = [[{"role": m.role, "content": m.content} for m in row.messages] for row in _chats(name)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"messages": t}) + "\n" for t in turns))
    ran = CliRunner().invoke(
        app, ["train-router", str(pair), *files, "--steps", "20", "--mixes", "20", "--json"]
    )
    assert ran.exit_code == 0, ran.output
    spec = read_spec(pair / "router.safetensors")
    assert spec.stages[0].params["ahead"]["cuts"] and "stages.0.ahead.inner.weight" in load_tensors(
        pair / "router.safetensors"
    )
    seen = CliRunner().invoke(app, ["inspect", str(pair), "--prompt", "12 ab", "--chat", "--json"])
    assert seen.exit_code == 0, seen.output
