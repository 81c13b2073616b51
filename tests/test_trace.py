"""Traces: files that come back as they were, damaged ones refused, texts of tokens that join."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from molora_cli.core.pieces import join_pieces, show_piece, split_tail, token_pieces
from molora_cli.core.trace import Trace, join, listing
from molora_cli.core.trace_files import FORMAT, is_trace_file, load_trace, save_trace
from molora_cli.errors import InputError


def _trace(n: int = 7, groups: int = 2, k: int = 2, seed: int = 0) -> Trace:
    rng = np.random.default_rng(seed)
    return Trace(
        token_ids=rng.integers(0, 20, n),
        starts=np.array([0, 3, 3], dtype=np.int64),
        indices=rng.integers(-1, 3, (n, groups, k)).astype(np.int16),
        gates=rng.random((n, groups, k)).astype(np.float32),
        adapters=("a", "b", "c"),
        scores=np.log(rng.dirichlet(np.ones(4), (n, groups))).astype(np.float32),
        experts=("a", "b", "c", "__base__"),
        domains=("x", None, "y"),
        pieces={1: "\udcf0", 2: "</script>\x1b"},
        meta={"router": "context", "groups": [[0, 2], [2, 4]]},
        content=np.arange(n) % 3 != 0,
    )


def _same(a: Trace, b: Trace) -> None:
    for name in ("token_ids", "starts", "indices", "gates", "scores", "content"):
        x, y = getattr(a, name), getattr(b, name)
        assert x.dtype == y.dtype and np.array_equal(x, y), name
    for name in ("adapters", "experts", "domains", "pieces", "meta"):
        assert getattr(a, name) == getattr(b, name), name


def test_file_round_trip(tmp_path: Path) -> None:
    trace, file = _trace(), tmp_path / "t.trace"
    trace.scores[0, 0, 1] = -np.inf  # type: ignore[index]
    save_trace(file, trace)
    assert is_trace_file(file)
    _same(load_trace(file), trace)
    with pytest.raises(InputError, match="exists"):
        save_trace(file, trace)
    save_trace(file, _trace(seed=1), force=True)
    assert [p.name for p in tmp_path.iterdir()] == ["t.trace"]


def test_a_trace_without_content_or_scores_loads(tmp_path: Path) -> None:
    trace = _trace()
    trace.content = trace.scores = None
    save_trace(tmp_path / "t", trace)
    loaded = load_trace(tmp_path / "t")
    assert loaded.content is None and loaded.scores is None
    assert loaded.of_template() == 0 and loaded.without_template() is loaded


def test_content_of_another_type_is_refused(tmp_path: Path) -> None:
    from safetensors import safe_open
    from safetensors.numpy import load_file, save_file

    save_trace(tmp_path / "t", _trace())
    tensors = load_file(tmp_path / "t")
    tensors["content"] = tensors["content"].astype(np.int32)
    with safe_open(tmp_path / "t", framework="numpy") as file:
        save_file(tensors, tmp_path / "u", metadata=file.metadata())
    with pytest.raises(InputError, match="content must be bool"):
        load_trace(tmp_path / "u")


def test_without_template_keeps_documents_and_rows() -> None:
    trace = _trace()  # documents of 3, 0 and 4 tokens
    trace.content = np.array([False, False, False, True, True, False, True])
    bare = trace.without_template()
    bare.check()
    assert trace.of_template() == 4 and bare.content is None and bare.domains == trace.domains
    assert bare.starts.tolist() == [0, 0, 0] and bare.lengths().tolist() == [0, 0, 3]
    for name in ("token_ids", "indices", "gates", "scores"):
        assert np.array_equal(getattr(bare, name), getattr(trace, name)[[3, 4, 6]]), name
    trace.content[:] = True
    assert trace.without_template() is trace


def test_file_size_per_token(tmp_path: Path) -> None:
    n = 10_000
    trace = Trace(
        np.arange(n), np.array([0]), np.zeros((n, 1, 1), np.int16), np.ones((n, 1, 1), np.float32), ("a",)
    )
    save_trace(tmp_path / "t", trace)
    assert (tmp_path / "t").stat().st_size < 12 * n


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"indices": np.full((7, 2, 2), 3, np.int16)}, "outside the 3 adapters"),
        ({"indices": np.full((7, 2, 2), -2, np.int16)}, "outside the 3 adapters"),
        ({"indices": np.zeros((6, 2, 2), np.int16)}, "route indices have shape"),
        ({"gates": np.full((7, 2, 2), np.nan, np.float32)}, "not finite"),
        ({"gates": np.zeros((7, 2, 1), np.float32)}, "gates have shape"),
        ({"starts": np.array([0, 5, 4])}, "do not rise"),
        ({"starts": np.array([1, 2, 3])}, "do not rise"),
        ({"starts": np.array([0, 3, 8])}, "do not rise"),
        ({"scores": np.full((7, 2, 4), np.nan, np.float32)}, "no log-probability"),
        ({"scores": np.full((7, 2, 4), 1.0, np.float32)}, "no log-probability"),
        ({"scores": np.zeros((7, 2, 3), np.float32)}, "scores have shape"),
        ({"content": np.ones(6, dtype=bool)}, "content has shape"),
        ({"token_ids": np.full(7, -1)}, "negative"),
        ({"domains": ("x", "y")}, "domain names"),
    ],
)
def test_contradictions_are_refused_on_load(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    trace = _trace()
    for name, value in change.items():
        setattr(trace, name, value)
    if "domains" in change:
        with pytest.raises(InputError, match=said):
            trace.check()
        return
    save_trace(tmp_path / "t", trace)
    with pytest.raises(InputError, match=said):
        load_trace(tmp_path / "t")


@pytest.mark.parametrize("version", [2, "1", None])
def test_versions(tmp_path: Path, version: object) -> None:
    from safetensors.numpy import load_file, save_file

    save_trace(tmp_path / "t", _trace())
    header = {"version": version, "adapters": [], "experts": [], "domains": [], "pieces": {}, "meta": {}}
    save_file(load_file(tmp_path / "t"), tmp_path / "u", metadata={FORMAT: json.dumps(header)})
    with pytest.raises(InputError, match="newer molora" if version == 2 else "no version"):
        load_trace(tmp_path / "u")


@pytest.mark.parametrize("cut", [0, 4, 40, 300, -1])
def test_cut_files(tmp_path: Path, cut: int) -> None:
    save_trace(tmp_path / "t", _trace())
    (tmp_path / "u").write_bytes((tmp_path / "t").read_bytes()[:cut])
    with pytest.raises(InputError):
        load_trace(tmp_path / "u")


def test_other_safetensors_is_no_trace(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    save_file({"x": np.zeros(3, np.float32)}, tmp_path / "m.safetensors")
    assert not is_trace_file(tmp_path / "m.safetensors")
    with pytest.raises(InputError, match="no trace"):
        load_trace(tmp_path / "m.safetensors")


def test_join_moves_starts() -> None:
    both = join([_trace(), _trace(seed=1)])
    both.check()
    assert both.starts.tolist() == [0, 3, 3, 7, 10, 10]
    assert len(both) == 14 and both.domains == ("x", None, "y") * 2
    plain = _trace()
    plain.content = None
    mixed = join([plain, _trace()]).content
    assert mixed is not None and mixed.tolist() == [True] * 7 + (np.arange(7) % 3 != 0).tolist()
    assert join([plain, plain]).content is None
    other = _trace()
    other.adapters = ("a", "b", "d")
    with pytest.raises(InputError, match="different routers"):
        join([_trace(), other])


def test_listing_escapes_half_characters() -> None:
    trace = _trace()
    trace.token_ids[:] = 1
    records = listing(trace, 5)
    assert [r["template"] for r in records] == [True, False, False, True, False]
    assert len(records) == 5 and records[0]["text"] == "\\xf0" and records[4]["document"] == 2
    json.dumps(records).encode("ascii")


TEXTS = ["naïve 👩‍💻 日本語\n\n\tx", "", "a" * 40, "\u202eabc\x00"]


def test_byte_level_pieces_join_to_the_text(tiny_llama: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tiny_llama / "tokenizer.json"))
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        pieces = token_pieces(tokenizer, set(ids))
        assert join_pieces(pieces[i] for i in ids) == text
    ids = tokenizer.encode("<|im_start|>").ids
    assert token_pieces(tokenizer, ids)[ids[0]] == "<|im_start|>"


def test_sentencepiece_pieces() -> None:
    from tokenizers import Tokenizer, decoders, models

    vocab = {"<unk>": 0, "▁the": 1, "s": 2, "<0xE6>": 3, "<0x97>": 4, "<0xA5>": 5}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(steps)
    pieces = token_pieces(tokenizer, range(6))
    assert join_pieces(pieces[i] for i in (1, 2, 3, 4, 5)) == " thes日"
    assert token_pieces(tokenizer, [99]) == {}


def test_split_tail_holds_back_only_unfinished_characters() -> None:
    data = "aé日👋"
    pieces = [data.encode()[i : i + 1].decode("utf-8", "surrogateescape") for i in range(10)]
    rest, seen = "", ""
    for piece in pieces:
        whole, rest = split_tail(rest + piece)
        assert "\ufffd" not in whole
        seen += whole
    assert seen == data and rest == ""
    assert split_tail("\udc80")[0] == "\ufffd"  # a byte that nothing can complete is not held back
    assert show_piece("\udc80") == "\\x80"
