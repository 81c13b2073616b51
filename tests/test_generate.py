"""Streaming: text that is never cut, stops, seeds, the context's end, and the reuse of what was read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from molora_cli.core import generate
from molora_cli.core.detokenize import TextStream
from molora_cli.core.generate import DecodeCache, Sampler, stop_ids, stream, stream_ids
from molora_cli.core.trace import Trace
from molora_cli.errors import InputError, MoloraError

TEXT = "👩‍💻 日本 ď"


class Stub:
    """The surface of a routed model over a plain base: even ids take adapter 0, odd ones the base."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.adapters = ("even", "other")
        self.device = torch.device("cpu")
        self.muted: frozenset[str] = frozenset()
        self.blocks: list[list[int]] = []

    @property
    def routing(self) -> object:
        return self.muted

    def forward(self, input_ids: torch.Tensor, *, route: Any = None, **named: Any) -> Any:
        ids = input_ids[0]
        self.blocks.append(ids.tolist())
        output = self.base(input_ids, **named)
        chosen = (
            torch.where(ids % 2 == 0, 0, -1)[:, None, None] if route is None else route.indices[0][:, None]
        )
        trace = Trace(
            token_ids=ids.numpy(),
            starts=np.zeros(1, np.int64),
            indices=chosen.numpy().astype(np.int16),
            gates=np.ones(chosen.shape, np.float32),
            adapters=self.adapters,
            scores=np.log(np.full((len(ids), 1, 2), 0.5, np.float32)) if route is None else None,
            experts=("even", "__base__"),
        )
        return SimpleNamespace(trace=trace, **output)


@pytest.fixture
def model(tiny_llama: Path) -> Stub:
    return Stub(tiny_llama)


def forced(ids: list[int]) -> Callable[[torch.Tensor], int]:
    """A sampler that says these ids, whatever the logits."""
    rest: Iterator[int] = iter(ids)
    return lambda logits: next(rest)


def test_letters_are_never_cut(model: Stub) -> None:
    ids = model.tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    events = list(stream_ids(model, [5], sampler=forced(ids), max_new_tokens=len(ids)))
    assert [event.id for event in events] == ids
    assert "".join(event.text for event in events) == TEXT
    assert not any("\ufffd" in event.text for event in events)


def test_bytes_that_are_no_text_become_replacement_characters_at_the_end(model: Stub) -> None:
    ids = model.tokenizer("a👩b", add_special_tokens=False)["input_ids"]
    for broken in (ids[:3], ids[:2] + ids[-1:], ids[2:4] * 5, ids[1:2] * 7 + ids):
        events = list(stream_ids(model, [5], sampler=forced(broken), max_new_tokens=len(broken)))
        assert "".join(event.text for event in events) == model.tokenizer.decode(broken)


def test_text_stream_equals_decode_with_byte_fallback(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    vocab = {"<unk>": 0, "▁a": 1, "b": 2, "▁": 3, **{f"<0x{i:02X}>": 4 + i for i in range(256)}}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    letter = [4 + byte for byte in "日".encode()]
    for ids in ([1, 2, 1], [1, *letter, 2, 1], [*letter, *letter[:1], 1], [1, *letter, *letter[:2]]):
        text = TextStream(fast)
        assert "".join(text.push(i)[0] for i in ids) + text.flush() == fast.decode(ids)


def test_the_first_events_route_is_that_of_the_last_prompt_token(model: Stub) -> None:
    events = list(stream_ids(model, [70, 71], sampler=forced([80, 81, 83]), max_new_tokens=3))
    assert [event.route.names for event in events] == [(("base",),), (("even",),), (("base",),)]
    assert events[0].route.scores == (
        (("even", pytest.approx(-0.693, abs=1e-3)), ("base", pytest.approx(-0.693, abs=1e-3))),
    )
    fixed = list(stream_ids(model, [70, 71], route="other", max_new_tokens=3))
    assert {event.route.indices for event in fixed} == {((1,),)}
    assert {event.route.scores for event in fixed} == {()}
    assert {event.route.top for event in stream_ids(model, [70], route="off", max_new_tokens=3)} == {-1}


def test_greedy_and_logprobs_equal_a_plain_loop(model: Stub) -> None:
    ids = model.tokenizer("hello there", add_special_tokens=False)["input_ids"]
    events = list(stream_ids(model, ids, max_new_tokens=12))
    for event in events:
        logits = model.base(torch.tensor([ids])).logits[0, -1].detach()
        assert event.id == int(logits.argmax())
        assert event.logprob == pytest.approx(float(logits.log_softmax(0)[event.id]), abs=1e-4)
        ids = [*ids, event.id]


def test_a_seed_repeats_and_top_k_and_top_p_cut() -> None:
    logits = torch.linspace(0, 3, 50)

    def draws(**settings: Any) -> list[int]:
        sampler = Sampler(1.0, **settings)
        return [sampler(logits) for _ in range(200)]

    assert draws(seed=1) == draws(seed=1) != draws(seed=2)
    assert set(draws(top_k=3)) == {47, 48, 49}
    assert set(draws(top_p=1e-6)) == {49}
    kept = set(draws(top_p=0.3))
    assert kept < set(range(40, 50)) and 49 in kept


@pytest.mark.parametrize(
    "settings", [{"temperature": -1}, {"temperature": float("nan")}, {"top_p": 0}, {"top_k": -1}]
)
def test_settings_out_of_range_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        Sampler(**settings)


def test_end_of_turn_of_the_template_stops(model: Stub) -> None:
    # the config says 2, the template ends turns with <|im_end|> = 4, and generation_config is gone
    model.base.generation_config = None
    assert model.base.config.eos_token_id == 2 and model.tokenizer.eos_token_id == 2
    assert stop_ids(model) == {2, 4}
    reason, events = drain(
        stream_ids(model, [70], sampler=forced([80, 4, 90]), stop=frozenset(stop_ids(model)))
    )
    assert (reason, [event.id for event in events]) == ("stop", [80])


def drain(events: Any) -> tuple[str, list[Any]]:
    seen = []
    while True:
        try:
            seen.append(next(events))
        except StopIteration as end:
            return end.value, seen


def test_the_end_of_turn_flushes_an_unfinished_letter(model: Stub) -> None:
    ids = model.tokenizer("日", add_special_tokens=False)["input_ids"][:2]
    _, events = drain(stream_ids(model, [70], sampler=forced([*ids, 4]), stop=frozenset({4})))
    assert "".join(event.text for event in events) == "\ufffd"


def test_ignore_eos_goes_on(model: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate, "Sampler", lambda *a: lambda logits: 4)
    assert list(stream(model, "hi")) == []
    events = list(stream(model, "hi", ignore_eos=True, max_new_tokens=4))
    assert [event.text for event in events] == ["<|im_end|>"] * 4


def test_a_prompt_beyond_the_context_names_both_numbers(model: Stub) -> None:
    with pytest.raises(InputError, match=r"400 tokens.*256"):
        stream(model, "x" * 400)
    with pytest.raises(InputError, match=r"256 tokens.*256"):
        stream(model, "x" * 256)


def test_an_answer_ends_with_the_context_and_says_so(model: Stub) -> None:
    told: list[str] = []
    reason, events = drain(stream(model, "x" * 250, max_new_tokens=50, ignore_eos=True, notify=told.append))
    assert (reason, len(events)) == ("context", 6)
    assert len(told) == 1 and "256" in told[0]
    reason, events = drain(stream(model, "x" * 250, max_new_tokens=6, ignore_eos=True, notify=told.append))
    assert (reason, len(events), len(told)) == ("length", 6, 1)


@pytest.mark.parametrize("arguments", [{"route": "nope"}, {"max_new_tokens": 0}])
def test_bad_arguments_are_refused_before_any_work(model: Stub, arguments: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        stream(model, "hi", **arguments)
    assert model.blocks == []


def test_a_text_has_one_bos_and_keeps_its_special_tokens(model: Stub) -> None:
    from tokenizers.processors import TemplateProcessing

    assert generate.encode_prompt(model, "<s>a<|im_end|>") == [1, *model.tokenizer("a")["input_ids"], 4]
    model.tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        "<s> $A </s>", None, [("<s>", 1), ("</s>", 2)]
    )
    letter = model.tokenizer("a", add_special_tokens=False)["input_ids"]
    assert generate.encode_prompt(model, "a") == [1, *letter]
    assert generate.encode_prompt(model, "<s>a") == [1, *letter]
    talk = [{"role": "user", "content": "a"}]
    assert generate.encode_prompt(model, talk)[0] == 3  # exactly the template, which writes no bos


def test_a_cached_prefix_is_read_once_and_changes_nothing(model: Stub) -> None:
    cache = DecodeCache()
    first = [event.id for event in stream_ids(model, [70, 71, 72], max_new_tokens=4, cache=cache)]
    longer = [70, 71, 72, *first, 75, 76]
    model.blocks.clear()
    again = list(stream_ids(model, longer, max_new_tokens=3, cache=cache))
    # the last token of an answer was never fed
    assert model.blocks[0] == [first[-1], 75, 76]
    assert [e.id for e in again] == [e.id for e in stream_ids(model, longer, max_new_tokens=3)]
    model.blocks.clear()
    changed = [70, 71, 99, 98]
    assert [e.id for e in stream_ids(model, changed, max_new_tokens=3, cache=cache)] == [
        e.id for e in stream_ids(model, changed, max_new_tokens=3)
    ]
    assert model.blocks[0] == [99, 98]


def test_another_routing_reads_everything_again(model: Stub) -> None:
    cache = DecodeCache()
    list(stream_ids(model, [70, 71, 72], max_new_tokens=2, cache=cache))
    for change in ({"route": "other"}, {"route": "auto"}):
        model.blocks.clear()
        list(stream_ids(model, [70, 71, 72], max_new_tokens=2, cache=cache, **change))
        assert model.blocks[0] == [70, 71, 72]
    model.blocks.clear()
    model.muted = frozenset({"other"})
    list(stream_ids(model, [70, 71, 72], max_new_tokens=2, cache=cache))
    assert model.blocks[0] == [70, 71, 72]


def test_a_forward_that_breaks_off_leaves_no_damaged_cache(
    model: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = DecodeCache()
    events = stream_ids(model, [70, 71], max_new_tokens=9, cache=cache, sampler=lambda logits: 80)
    next(events)
    whole = model.forward

    def broken(*arguments: Any, **named: Any) -> Any:
        whole(*arguments, **named)
        raise KeyboardInterrupt

    monkeypatch.setattr(model, "forward", broken)
    with pytest.raises(KeyboardInterrupt):
        next(events)
    assert cache.past is None
    assert cache.take([70, 71, 72], "auto") == (None, 0)


def test_stopping_early_keeps_a_cache_that_fits(model: Stub) -> None:
    cache = DecodeCache()
    events = stream_ids(model, [70, 71], max_new_tokens=9, cache=cache, sampler=lambda logits: 80)
    made = [next(events).id for _ in range(3)]
    events.close()
    assert cache.ids == [70, 71, *made[:2]]
    assert cache.past.get_seq_length() == len(cache.ids)


def test_logits_that_are_no_numbers_are_an_error(model: Stub) -> None:
    with torch.no_grad():
        model.base.lm_head.weight.fill_(float("nan"))
    with pytest.raises(MoloraError, match="NaN"):
        list(stream_ids(model, [70]))
