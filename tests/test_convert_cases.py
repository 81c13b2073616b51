"""Every known adapter that must be exact ($MOLORA_CASES): the right logits out of a bundle, out of each other
format and back, and out of a merged model; or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from molora_cli.core import compose
from molora_cli.core.adapter.factors import Factors, load_factors
from molora_cli.core.adapter.read import read_adapter
from molora_cli.core.base.structure import read_structure
from molora_cli.core.bundle.manifest import Effect
from molora_cli.core.convert.deltas import relative_errors
from molora_cli.core.convert.plan import Request, plan
from molora_cli.core.convert.run import convert
from molora_cli.core.convert.verify import Probe
from molora_cli.core.routed.model import RoutedModel, load
from molora_cli.core.routed.route import Route
from molora_cli.errors import InputError
from molora_cli.refs import parse_ref

# what the target cannot say: (words of the adapter's name, target) -> words of the refusal
REFUSED = {
    ("dora", "gguf"): "DoRA",
    ("lora_bias", "gguf"): "lora_bias",
    ("lora_bias", "mlx"): "lora_bias",
    ("tied", "gguf"): "embedding",
    ("tied", "mlx"): "embedding",
    ("gpt2", "mlx"): "no module of this path",
}
# the same function in another format
SAME_AS = {
    "formats/gguf/llama_plain_code_f32.gguf": "adapters/plain_code",
    "formats/gguf/llama_rslora_alpha_corrected.gguf": "adapters/rslora",
    "formats/gguf/qwen2_attn_f32.gguf": "adapters/qwen2_attn",
}
CLOSE = 1e-4  # of float32 logits


@lru_cache
def model_of(folder: Path) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def logits(base: Path, factors: dict[str, Factors], ids: Tensor) -> Tensor:
    routed = RoutedModel.from_parts(model_of(base), {"one": factors}, backend="torch")
    try:
        route = Route.constant([0], [1.0], *ids.shape)
        return routed(ids, route=route, use_cache=False).logits  # type: ignore[no-any-return]
    finally:
        routed.detach()


@torch.no_grad()
def bundle_logits(bundle: Path, ids: Tensor) -> Tensor:
    routed = load(str(bundle), device="cpu", dtype="float32")
    return routed(ids, route=Route.constant([0], [1.0], *ids.shape), use_cache=False).logits  # type: ignore[no-any-return]


def must_be_exact(cases: Path) -> list[tuple[str, Path, bool]]:
    """(path, base, whether it may be without effect) of single adapters that are to be exact."""
    found = []
    for line in (cases / "INDEX.tsv").read_text().splitlines()[1:]:
        place, base, must = line.split("\t")[:3]
        one = (cases / place / "adapter_config.json").is_file() or place.endswith(".gguf")
        if one and (cases / "bases" / base).is_dir() and must.startswith("exact") and "exact-or" not in must:
            found.append((place, cases / "bases" / base, "allow-noop" in must))
    return found


@pytest.mark.slow
def test_each_case_to_each_format_and_back(
    cases: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("gguf")
    # logits are compared here, on bases that are loaded once; a command's own proofs load them each time
    monkeypatch.setattr(Probe, "of", classmethod(lambda cls, work, ticker=None: None))
    same = Effect(max_abs=1, rms=1, base_rms=1)
    monkeypatch.setattr(
        compose, "measure_effect", lambda work, t: ({a.name: same for a in work.adapters}, {})
    )
    done = dict.fromkeys(("peft", "mlx", "gguf", "bundle", "merged-model", "refused", "logits"), 0)
    for place, base, noop in must_be_exact(cases):
        modules = read_structure(base)
        before = load_factors(read_adapter("x", parse_ref(str(cases / place)), modules, allow_noop=noop))
        expected = cases / SAME_AS.get(place, place) / "expected.safetensors"
        known = load_file(expected) if expected.is_file() else {}

        def close(got: Callable[[Tensor], Tensor], what: str, known: dict[str, Tensor] = known) -> None:
            if known:
                difference = (got(known["input_ids"]) - known["logits"]).abs().max().item()
                assert difference < CLOSE, (what, difference)
                done["logits"] += 1

        close(lambda ids, f=before, b=base: logits(b, f, ids), place)  # type: ignore[misc]
        for to in ("peft", "mlx", "gguf", "bundle", "merged-model"):
            there = tmp_path / f"{place.replace('/', '-')}.{to}"
            words = next((w for (name, t), w in REFUSED.items() if t == to and name in place), None)
            request = Request(str(cases / place), there, to, base=str(base), allow_noop=noop)
            if words is not None:
                with pytest.raises(InputError, match=words):
                    plan(request)
                done["refused"] += 1
                continue
            convert(plan(request))
            done[to] += 1
            if to == "merged-model":
                with torch.no_grad():
                    close(lambda ids, m=there: model_of.__wrapped__(m)(ids).logits, f"{place} {to}")  # type: ignore[misc]
                continue
            if to == "bundle":
                close(lambda ids, b=there: bundle_logits(b, ids), f"{place} {to}")  # type: ignore[misc]
            back = tmp_path / f"{there.name}.back"
            only = tuple(p.name for p in (there / "adapters").iterdir()) if to == "bundle" else ()
            again = Request(str(there), back, "peft", base=str(base), adapters=only, allow_noop=True)
            convert(plan(again))
            after = load_factors(read_adapter("y", parse_ref(str(back)), modules, allow_noop=True))
            worst = max(relative_errors(before, after).values())
            assert worst < 1e-6, (place, to, worst)
            close(lambda ids, f=after, b=base: logits(b, f, ids), f"{place} {to} and back")  # type: ignore[misc]
    with capsys.disabled():
        print(f"\nexact cases: {done}")  # noqa: T201
    assert min(done.values()) >= 6 and min(done["peft"], done["bundle"], done["merged-model"]) > 25, done
