"""An adapter that joins a model in use computes what a model with all adapters from the start computes."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from molora_cli import Route, RoutedModel, load
from molora_cli.core.adapter.factors import load_factors
from molora_cli.core.adapter.read import read_adapter
from molora_cli.core.base.structure import read_structure
from molora_cli.core.chat_load import load_adapter
from molora_cli.errors import InputError
from molora_cli.refs import parse_ref

MORE = {"target_modules": ["q_proj", "down_proj", "o_proj"], "r": 7}
KINDS: dict[str, dict[str, Any]] = {
    "plain": MORE,
    "dora": {**MORE, "use_dora": True},
    "bias": {**MORE, "lora_bias": True},
    "embedding": {"target_modules": ["embed_tokens", "v_proj", "lm_head"]},
}


@pytest.fixture(params=["torch", "cpu"])
def backend(request: pytest.FixtureRequest) -> str:
    from molora_cli.core.routed.model import resolve_backend

    try:
        return resolve_backend(request.param)
    except InputError as error:
        pytest.skip(str(error))


def base_of(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def logits(model: RoutedModel, top: int) -> torch.Tensor:
    """Logits (2, 9, V) under a route that takes every adapter up to `top` and the base somewhere."""
    seeded = torch.Generator().manual_seed(3)
    ids = torch.randint(6, 300, (2, 9), generator=seeded)
    indices = torch.randint(-1, top + 1, (2, 9, 2), generator=seeded)
    gates = torch.rand(2, 9, 2, generator=seeded)
    with torch.no_grad():
        return model.forward(ids, route=Route(indices, gates)).logits


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_added_later_computes_the_same(
    tiny_llama: Path, trio: dict[str, Path], make_adapter: Callable[..., Path], kind: str, backend: str
) -> None:
    folders = {**trio, "more": make_adapter(tiny_llama, f"load-{kind}", seed=9, **KINDS[kind])}
    structure = read_structure(tiny_llama)
    factors = {n: load_factors(read_adapter(n, parse_ref(str(f)), structure)) for n, f in folders.items()}
    whole = RoutedModel.from_parts(base_of(tiny_llama), factors, backend=backend)
    first = dict(list(factors.items())[:2])
    grown = RoutedModel.from_parts(base_of(tiny_llama), first, backend=backend)
    before = logits(grown, 1)
    for name in list(factors)[2:]:
        grown.add(name, factors[name])
    assert grown.adapters == tuple(factors)
    assert torch.equal(logits(grown, 3), logits(whole, 3))
    # the others' numbers are those from before, up to the order of a longer sum; layouts do not pile up
    assert torch.allclose(logits(grown, 1), before, atol=1e-4)
    assert len(grown.engine.context.layouts) == len(whole.engine.context.layouts)
    plain = base_of(tiny_llama)
    ids = torch.arange(6, 20)[None]
    grown.detach()
    assert torch.equal(grown.base(ids).logits, plain(ids).logits)


def test_a_loaded_adapter_is_reachable_by_name_and_the_router_goes_on(
    pair: Path, trio: dict[str, Path]
) -> None:
    from molora_cli.core.bundle.store import Bundle
    from molora_cli.core.router.attach import Request as Rules
    from molora_cli.core.router.attach import attach

    opened = Bundle.open(pair)
    made = attach(opened, Rules(kind="vocab", rules=("one=range:64-150",), rest="base"))
    opened.set_router(made.spec, made.tensors)
    manifest = (pair / "molora.json").read_bytes()
    model = load(pair)
    routed = [e.id for e in model.stream("hello", max_new_tokens=6, ignore_eos=True)]
    done = load_adapter(model, "new", str(trio["new"]))
    assert (done.name, done.modules) == ("new", 8) and done.seconds > 0
    assert [e.id for e in model.stream("hello", max_new_tokens=6, ignore_eos=True)] == routed
    events = list(model.stream("hello", route="new", max_new_tokens=6, ignore_eos=True))
    assert {e.route.names[0][0] for e in events} == {"new"}
    model.muted = {"new"}  # a name that the router does not know, and that there is all the same
    assert (pair / "molora.json").read_bytes() == manifest


@pytest.mark.parametrize(
    ("name", "place", "reason"),
    [
        ("ONE", "trio", "an adapter 'one' already"),
        ("base", "trio", "reserved"),
        ("a b", "trio", "cannot name an adapter"),
        ("x", "nowhere", "neither an existing path"),
        ("x", "empty", "adapter_config.json"),
        ("x", "noop", "zero|changes nothing|without effect|no effect"),
    ],
)
def test_what_cannot_be_loaded_leaves_the_model_as_it_was(
    pair: Path,
    trio: dict[str, Path],
    tiny_llama: Path,
    make_adapter: Callable[..., Path],
    tmp_path: Path,
    name: str,
    place: str,
    reason: str,
) -> None:
    model = load(pair)
    before = logits(model, 1)
    (tmp_path / "empty").mkdir()
    places = {"trio": str(trio["new"]), "empty": str(tmp_path / "empty"), "nowhere": "nowhere/at/all"}
    if place == "noop":
        from safetensors.torch import load_file, save_file

        folder = Path(shutil.copytree(trio["new"], tmp_path / "noop"))
        tensors = load_file(folder / "adapter_model.safetensors")
        save_file({k: t * 0 for k, t in tensors.items()}, folder / "adapter_model.safetensors")
        places["noop"] = str(folder)
    with pytest.raises(InputError, match=reason):
        load_adapter(model, name, places[place])
    assert model.adapters == ("one", "two") and torch.equal(logits(model, 1), before)


def test_an_arrow_router_refuses_modules_that_it_does_not_know(
    pair: Path, tiny_llama: Path, trio: dict[str, Path], make_adapter: Callable[..., Path]
) -> None:
    from molora_cli.core.bundle.store import Bundle
    from molora_cli.core.router.attach import Request as Rules
    from molora_cli.core.router.attach import attach

    opened = Bundle.open(pair)
    made = attach(opened, Rules(kind="arrow"))
    opened.set_router(made.spec, made.tensors)
    model = load(pair)
    load_adapter(model, "new", str(trio["new"]))  # the same modules: fine
    assert list(model.stream("hello", max_new_tokens=2, ignore_eos=True))
    wide = make_adapter(tiny_llama, "load-wide", seed=4, target_modules=["o_proj"])
    with pytest.raises(InputError, match=r"arrow router.*o_proj"):
        load_adapter(model, "wide", str(wide))
    assert list(model.stream("hello", max_new_tokens=2, ignore_eos=True))
