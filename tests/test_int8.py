"""Int8 weights: what they lose, who may have them, and that everything else goes on as with full ones."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from molora_kernels import int8_linear, plain_linear, quantise_rows, resolve, widen_rows
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from typer.testing import CliRunner

from molora_cli.app import app
from molora_cli.core.adapter.factors import Factors
from molora_cli.core.routed.int8 import Int8Linear
from molora_cli.core.routed.model import RoutedModel, load
from molora_cli.core.routed.quantise import LIMIT, quantise_base
from molora_cli.core.routed.route import Route
from molora_cli.errors import InputError, MoloraError


@pytest.fixture
def base(tiny_llama: Path) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32).eval()
    return model.requires_grad_(False)


@pytest.fixture(params=["torch", "cpu"])
def backend(request: pytest.FixtureRequest) -> str:
    try:
        return resolve(request.param)
    except ValueError as error:
        pytest.skip(str(error))


def widened(base: PreTrainedModel) -> PreTrainedModel:
    """The same base with what its int8 weights stand for."""
    found = copy.deepcopy(base)
    for path, module in list(found.named_modules()):
        if isinstance(module, Int8Linear):
            plain = nn.Linear(module.in_features, module.out_features, bias=module.bias is not None)
            plain.weight = nn.Parameter(module.widened())
            plain.bias = module.bias
            parent, _, name = path.rpartition(".")
            setattr(found.get_submodule(parent), name, plain)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("shape", [(1, 1), (3, 70), (700, 33), (1, 3000), (4, 0), (0, 4)])
def test_every_weight_is_within_half_a_step(shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight = (torch.randn(shape) * torch.rand(shape[0], 1) * 5).to(dtype)
    if len(weight) > 1:
        weight[1] = 0
    q, scale, error = quantise_rows(weight)
    assert q.dtype == torch.int8 and q.shape == weight.shape and bool((scale > 0).all())
    off = widen_rows(q, scale) - weight.float()
    assert bool((off.abs() <= 0.5001 * scale[:, None]).all())
    if weight.numel():  # the largest of a row is met exactly
        assert torch.allclose(widen_rows(q, scale).abs().amax(1), weight.float().abs().amax(1), rtol=1e-5)
    if weight.numel() > 2000:
        shares = (off.norm(dim=1) / weight.float().norm(dim=1)).nan_to_num(0)
        assert error == pytest.approx(float(shares.mean()), rel=0.1)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_refused(bad: float, base: PreTrainedModel) -> None:
    weight = torch.randn(5, 6)
    weight[3, 2] = bad
    with pytest.raises(ValueError, match="NaN or Inf"):
        quantise_rows(weight)
    base.model.layers[1].mlp.up_proj.weight[3, 2] = bad
    with pytest.raises(InputError, match=r"layers\.1\.mlp\.up_proj"):
        quantise_base(base)


LIMITS = {torch.float32: 6e-5, torch.bfloat16: 5e-3, torch.float64: 1e-6}


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("tokens", [0, 1, 5, 40])
def test_products_are_those_of_the_float_values(tokens: int, dtype: torch.dtype, backend: str) -> None:
    q, scale, _ = quantise_rows(torch.randn(41, 70))
    x, bias = torch.randn(2, tokens, 70).to(dtype), torch.randn(41).to(dtype)
    exact = x.double() @ (q.double() * scale.double()[:, None]).t() + bias.double()
    for got in (int8_linear(x, q, bias, scale), plain_linear(x, q, bias, backend, scale)):
        assert got.dtype == dtype and got.shape == exact.shape
        assert bool(
            ((got.double() - exact).abs() <= LIMITS[dtype] * (exact.abs().max() if tokens else 1)).all()
        )


def test_gradients_reach_the_input(backend: str) -> None:
    q, scale, _ = quantise_rows(torch.randn(4, 6))
    x = torch.randn(3, 6, requires_grad=True)
    plain_linear(x, q, None, backend, scale).sum().backward()
    assert x.grad is not None and torch.allclose(x.grad, widen_rows(q, scale).sum(0).expand(3, 6), atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize(("batch", "length"), [(1, 1), (2, 5), (2, 40)])
def test_a_routed_model_computes_with_the_float_values(
    batch: int, length: int, base: PreTrainedModel, backend: str
) -> None:
    gen = torch.Generator().manual_seed(0)

    def some(module: nn.Linear | Int8Linear, special: bool) -> Factors:
        A, B = (
            torch.randn(3, module.in_features, generator=gen),
            torch.randn(module.out_features, 3, generator=gen),
        )
        magnitude = 1 + torch.rand(len(B), generator=gen) if special else None
        return Factors(A=A * 0.1, B=B * 0.1, scale=0.7, magnitude=magnitude, bias=None)

    quantise_base(base)
    places = {p: m for p, m in base.named_modules() if p.endswith(("q_proj", "down_proj"))}
    factors = {name: {p: some(m, name == "b") for p, m in places.items()} for name in ("a", "b")}
    twin = RoutedModel(widened(base), factors, backend="torch").eval()
    model = RoutedModel(base, factors, backend=backend).eval()
    ids = torch.randint(3, 300, (batch, length), generator=gen)
    indices = torch.randint(-1, 2, (batch, length, 2), generator=gen)
    indices[:, -1, 0] = 1
    route = Route(indices, torch.rand(batch, length, 2))
    wanted, got = (m(ids, route=route).logits for m in (twin, model))
    # few tokens meet such weights as 16-bit integers
    assert float((wanted - got).abs().max()) <= 3e-4 * float(wanted.abs().max())
    model.off()
    assert float((model(ids).logits - wanted).abs().max()) > 1e-3


def test_what_becomes_of_a_base(base: PreTrainedModel) -> None:
    embedding = base.get_input_embeddings().weight
    kept, tied = embedding.clone(), base.get_output_embeddings().weight is embedding
    report = quantise_base(base)
    assert report.taken == 4 * 7 + 1 and not report.kept and report.lines() == []
    assert 0 < report.error < LIMIT
    assert not any(type(m) is nn.Linear for m in base.modules())
    assert torch.equal(embedding, kept) and embedding.dtype == torch.float32, tied
    with pytest.raises(InputError, match="no plain linears"):
        quantise_base(base)
    half = base.to(torch.bfloat16)
    module = half.model.layers[0].self_attn.q_proj
    assert (module.weight.dtype, module.row_scale.dtype) == (torch.int8, torch.float32)
    assert half(torch.tensor([[5, 6]])).logits.dtype == torch.bfloat16


def test_a_head_that_was_tied_cannot_be_tied_again(base: PreTrainedModel) -> None:
    base.config.tie_word_embeddings = True
    base.tie_weights()
    quantise_base(base)
    wanted = base(torch.tensor([[5, 6]])).logits
    with pytest.raises(MoloraError, match="tie weights before"):
        base.tie_weights()
    assert torch.equal(base(torch.tensor([[5, 6]])).logits, wanted)


def test_scales_of_any_strides_and_none_that_do_not_fit(backend: str) -> None:
    q, scale, _ = quantise_rows(torch.randn(5, 7))
    wide = torch.stack([scale, -scale], 1)[:, 0]
    x = torch.randn(2, 7)
    assert torch.equal(plain_linear(x, q, None, backend, wide), plain_linear(x, q, None, backend, scale))
    with pytest.raises(RuntimeError):
        plain_linear(x, q, None, backend, scale[:3])
    if backend == "cpu":
        with pytest.raises(RuntimeError, match="a bias of 5"):
            plain_linear(x, q, torch.zeros(3), backend, scale)


def test_outliers_keep_their_weights(base: PreTrainedModel) -> None:
    base.model.layers[2].mlp.gate_proj.weight[:, 0] = 40.0
    report = quantise_base(base)
    assert list(report.kept) == ["model.layers.2.mlp.gate_proj"]
    assert type(base.model.layers[2].mlp.gate_proj) is nn.Linear
    (line,) = report.lines()
    assert "1 of 29" in line and "layers.2.mlp.gate_proj" in line


def test_a_bundle_with_int8_weights(chat_bundle: Path, backend: str) -> None:
    model = load(chat_bundle, backend=backend, weights="int8")
    ids = torch.randint(3, 300, (1, 12))
    with torch.no_grad():
        full, eight = load(chat_bundle)(ids).logits, model(ids)
    assert 0 < float((full - eight.logits).norm() / full.norm()) < 0.05
    assert eight.trace is not None
    with pytest.raises(InputError, match="int4"):
        load(chat_bundle, weights="int4")


def test_chat_answers_with_them(chat_bundle: Path) -> None:
    ask = ["chat", str(chat_bundle), "--prompt", "hello", "--max-new-tokens", "3", "--no-compile", "--json"]
    found = CliRunner().invoke(app, [*ask, "--weights", "int8"])
    assert found.exit_code == 0, found.output
    assert len(found.stdout.splitlines()) == 4
    refused = CliRunner().invoke(app, [*ask, "--weights", "4"])
    assert isinstance(refused.exception, InputError)


def test_eval_measures_them(chat_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOLORA_CACHE", str(tmp_path / "cache"))
    texts = {"math": "one and two make ", "code": "def f(): return "}
    data = []
    for name, text in texts.items():
        turns = [{"role": "user", "content": text}, {"role": "assistant", "content": text * 2}]
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
        data.append(f"--data={name}={tmp_path / name}.jsonl")
    ask = ["eval", str(chat_bundle), *data, "--modes", "1", "--json"]

    def measured(*more: str) -> dict[str, float]:
        found = CliRunner().invoke(app, [*ask, "--baselines", "none", *more])
        assert found.exit_code == 0, found.output
        document = json.loads(found.stdout)
        assert document["weights"] == (more[1] if more else "full")
        (one,) = document["sets"].values()
        return {row["name"]: row["nll"]["math"]["value"] for row in one["rows"]}

    full, eight = measured(), measured("--weights", "int8")
    assert full.keys() == eight.keys()
    for name, nll in full.items():  # kept apart in the store, and close to one another
        assert eight[name] != nll and eight[name] == pytest.approx(nll, rel=0.01)
    with monkeypatch.context() as patch:
        patch.setattr("molora_cli.core.routed.quantise.LIMIT", 0.0)
        stays = CliRunner().invoke(app, [*ask, "--baselines", "none", "--weights", "int8", "--no-cache"])
    assert any("linears keep their weights" in note for note in json.loads(stays.stdout)["notes"])
    refused = CliRunner().invoke(app, [*ask, "--baselines", "arrow", "--weights", "int8"])
    assert isinstance(refused.exception, InputError) and "PEFT" in str(refused.exception)
    # said before anything is read
    unknown = CliRunner().invoke(app, [*ask, "--baselines", "arrow", "--weights", "int4"])
    assert isinstance(unknown.exception, InputError) and "int4: there is no such kind" in str(
        unknown.exception
    )
