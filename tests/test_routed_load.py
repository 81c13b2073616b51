"""From a composed bundle to a routed model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

import molora_cli
from molora_cli.core.bundle.store import Bundle
from molora_cli.core.compose import Request, compose, plan
from molora_cli.core.router.spec import RouterSpec, StageSpec
from molora_cli.errors import InputError

SPECIAL = {
    "plain": {"target_modules": ["q_proj", "v_proj"]},
    "dora": {"target_modules": ["down_proj"], "use_dora": True, "r": 3},
    "patterns": {"target_modules": "all-linear", "rank_pattern": {"k_proj": 6}, "use_rslora": True},
    "embedding": {"target_modules": ["embed_tokens", "lm_head"], "r": 2},
}


@pytest.fixture(scope="module")
def folders(tiny_llama: Path, make_adapter: Callable[..., Path]) -> dict[str, Path]:
    return {
        name: make_adapter(tiny_llama, name, seed=seed, **options)
        for seed, (name, options) in enumerate(SPECIAL.items())
    }


@pytest.fixture
def bundle(tmp_path: Path, tiny_llama: Path, folders: dict[str, Path]) -> Path:
    pairs = tuple((name, str(path)) for name, path in folders.items())
    compose(plan(Request(output=tmp_path / "bundle", adapters=pairs, base=str(tiny_llama))))
    return tmp_path / "bundle"


@torch.no_grad()
def test_each_adapter_of_a_bundle_is_pefts(bundle: Path, tiny_llama: Path, folders: dict[str, Path]) -> None:
    base = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32).eval()
    model = molora_cli.load(bundle, base=str(tiny_llama), device="cpu")
    assert model.adapters == tuple(SPECIAL) == model.bundle.adapters
    assert model.dtype == torch.float32 and model.tokenizer is not None and model.router is None
    assert not any(p.requires_grad for p in model.parameters())
    ids = torch.randint(3, 300, (2, 10), generator=torch.Generator().manual_seed(0))
    plain = base(ids).logits
    for name, folder in folders.items():
        wanted = PeftModel.from_pretrained(copy.deepcopy(base), folder).eval()(ids).logits
        assert float((wanted - plain).abs().max()) > 1e-3 * float(plain.abs().max()), name
        model.only(name)
        error = float((model(ids).logits - wanted).abs().max())
        assert error <= 1e-5 * float(wanted.abs().max()), f"{name}: {error}"
    model.off()
    assert torch.equal(model(ids).logits, plain)  # twenty tokens: torch's own product


@torch.no_grad()
def test_the_bundles_router_decides(bundle: Path, tiny_llama: Path) -> None:
    spec = RouterSpec(stages=[StageSpec(kind="fixed", experts=["dora"])])
    Bundle.open(bundle).set_router(spec, {})
    model = molora_cli.load(bundle, base=str(tiny_llama), device="cpu")
    ids = torch.randint(3, 300, (1, 6))
    routed = model(ids)
    assert routed.trace.indices.flatten().tolist() == [1] * 6
    assert routed.trace.meta["digest"] == model.bundle.digest
    assert (routed.trace.meta["router"], routed.trace.meta["groups"]) == ("fixed", [[0, 4]])
    model.only("dora")
    assert torch.equal(model(ids).logits, routed.logits)


def test_backend_that_is_not_there_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--backend gpu"):
        molora_cli.load(tmp_path / "nothing", backend="gpu")
