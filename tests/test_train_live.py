"""Routers on hidden states from labelled rows, `sequence` and `arrow`: fitted, written, compared."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from molora_cli.app import app
from molora_cli.core.adapter.factors import Factors
from molora_cli.core.router.arrow import fit_arrow, prototype
from molora_cli.core.router.files import join_tensors
from molora_cli.core.router.kinds import Surroundings
from molora_cli.core.router.sequence import SequenceStage, answer_marker, fit_sequence
from molora_cli.core.router.spec import RouterSpec
from molora_cli.core.router.stack import RouterStack
from molora_cli.core.router.taps import default_taps
from molora_cli.core.training.data import Example, Message
from molora_cli.core.training.heads import HeadSettings, fit_lda
from molora_cli.core.training.live_job import LiveSettings, chosen_taps, live_score, train_live
from molora_cli.core.training.metrics import measure
from molora_cli.core.training.router_loop import train_context
from molora_cli.core.training.router_rows import RouterRows, RouterSettings, prepare
from molora_cli.core.training.states import States, collect_states, label_route
from molora_cli.errors import InputError

NAMES = ("num", "low", "up")
WORDS = {"num": "0123456789", "low": "abcdefghij", "up": "ABCDEFGHIJ"}
SETTINGS = RouterSettings(
    steps=30, every=10, batch=6, mixes=20, max_length=96, val_share=0.2, projection=16, hidden=16
)
LIVE = LiveSettings(taps=(1, 2), rows=10, mixes=12, heads=HeadSettings(steps=80, batch=256, lr=1e-2))


def _chats(name: str, count: int = 12) -> list[Example]:
    rng = random.Random(name)

    def word() -> str:
        return "".join(rng.choice(WORDS[name]) for _ in range(rng.randint(6, 16)))

    turns = [(Message("user", word()), Message("assistant", word())) for _ in range(count)]
    return [Example(pair, None, None, i + 1) for i, pair in enumerate(turns)]


@pytest.fixture(scope="module")
def tokenizer(tiny_llama: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_llama)


@pytest.fixture(scope="module")
def rows(tokenizer: Any) -> RouterRows:
    return prepare({name: _chats(name) for name in NAMES}, tokenizer, SETTINGS)


@pytest.fixture
def model(tiny_llama: Path) -> Any:
    from transformers import AutoModelForCausalLM

    from molora_cli import RoutedModel

    base = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(2)

    def factors() -> Factors:
        return Factors(
            torch.randn(2, 64, generator=generator) / 8, torch.randn(64, 2, generator=generator) / 8, 1.0
        )

    paths = [f"model.layers.{i}.self_attn.q_proj" for i in range(4)]
    return RoutedModel.from_parts(base, {name: {p: factors() for p in paths} for name in NAMES})


@pytest.mark.parametrize("kind", ["taps", "hidden", "layer", "context+taps"])
def test_a_router_learns_from_labels_and_reproduces(model: Any, rows: RouterRows, kind: str) -> None:
    live = LIVE if kind in ("taps", "context+taps") else LiveSettings(rows=10, mixes=12, heads=LIVE.heads)
    context = None
    if kind == "context+taps":
        made = train_context(rows, model.base.get_input_embeddings().weight.detach(), SETTINGS)
        context = (made.spec, made.tensors)
    spec, tensors = train_live(kind, model, rows, SETTINGS, live, context=context)
    again = train_live(kind, model, rows, SETTINGS, live, context=context)[1]
    assert all(torch.equal(tensors[name], again[name]) for name in tensors)
    assert spec.kind == kind
    found = measure(live_score(model, spec, tensors), rows)
    # the base is random: its states tell less than the ids, and much more than nothing (a third)
    assert all((found.accuracy(i) or 0) > 0.65 for i in range(3)), found.document()
    # some of these tokens lead to another part, which no state of a random base can tell
    assert (found.mixed_accuracy or 0) > 0.45
    ranges = model.router.group_ranges
    wanted = {
        "taps": [(1, 2), (2, 4)],
        "hidden": [(0, 4)],
        "layer": [(i, i + 1) for i in range(4)],
        "context+taps": [(0, 1), (1, 2), (2, 4)],
    }
    assert ranges == wanted[kind]
    if kind == "context+taps":
        assert spec.stages[1].params["prior"] == "context"
        # the stage on ids decides the first layer, whatever the taps say
        ids = rows.held_out["num"][0].ids.unsqueeze(0)
        with torch.no_grad():
            scores = model(ids).trace.scores
        assert not (scores[:, 0] == scores[:, 1]).all()


def test_the_decision_alone_equals_that_of_a_whole_forward(model: Any, rows: RouterRows) -> None:
    for kind in ("taps", "hidden"):
        live = LIVE if kind == "taps" else LiveSettings(rows=4, mixes=2, heads=LIVE.heads)
        spec, tensors = train_live(kind, model, rows, SETTINGS, live)
        live_score(model, spec, tensors)
        ids = rows.held_out["low"][0].ids.unsqueeze(0)
        last: list[int] = []
        handle = model.base.model.layers[3].register_forward_pre_hook(lambda m, a, to=last: to.append(1))
        decision = model.engine.decide(ids)
        handle.remove()
        assert len(last) == (0 if kind == "taps" else 1), "taps need no layer above the last one they read"
        with torch.no_grad():
            trace = model(ids).trace
        assert decision.route.indices[0].tolist() == trace.indices.tolist()


def test_states_are_those_of_the_route_that_labels_say(model: Any, rows: RouterRows) -> None:
    row = rows.train["up"][0]
    states = collect_states(model, [row], NAMES, (1, 3))
    model.only("up")
    with torch.no_grad():
        alone = model(row.ids.unsqueeze(0), output_hidden_states=True).hidden_states
        model.off()
        bare = model(row.ids.unsqueeze(0), output_hidden_states=True).hidden_states
    known = row.labels >= 0
    width = (alone[1].shape[-1],)
    # below the first tap it is the base
    first = torch.nn.functional.layer_norm(bare[1][0][known], width)
    assert torch.allclose(states.hidden[1].float(), first, atol=2e-3)
    third = torch.nn.functional.layer_norm(alone[3][0][known], width)
    assert states.hidden[3].shape == third.shape
    assert not torch.allclose(states.hidden[3].float(), third, atol=2e-3), "layer 0 had no adapter"
    assert states.labels.tolist() == row.labels[known].tolist()


def test_tokens_without_a_label_take_the_one_before_or_after() -> None:
    labels = torch.tensor([[-1, -1, 1, -1, 0, -1], [-1] * 6])
    route = label_route(labels, ["b", "__base__"], ["a", "b"], 1, 3)
    assert route.indices[0, :, 2, 0].tolist() == [-1, -1, -1, -1, 1, 1]
    assert route.indices[0, :, 0, 0].tolist() == [-1] * 6
    assert (route.indices[1] == -1).all() and (route.gates[1] == 0).all()


def test_closed_form_statistics_add_up() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(200, 8, generator=generator)
    labels = torch.randint(0, 3, (200,), generator=generator)
    x[labels == 1] += 1.0

    def states(pick: torch.Tensor) -> States:
        return States({2: x[pick].half()}, labels[pick], None, torch.zeros(int(pick.sum())))

    everything = torch.ones(200, dtype=torch.bool)
    whole = fit_lda(states(everything), NAMES)
    part = fit_lda(states(labels < 2), NAMES[:2])
    grown = fit_lda(states(labels == 2), NAMES, known=part)
    assert torch.allclose(grown["taps.0.weight"], whole["taps.0.weight"], atol=1e-3)
    with pytest.raises(InputError, match="no example has a token of 'up'"):
        fit_lda(states(labels < 2), NAMES)


def test_which_layers_are_read() -> None:
    assert default_taps(30) == (1, 3, 15) and default_taps(4) == (1, 2) and default_taps(1) == (0,)
    assert chosen_taps("hidden", 30, None) == (15,) and chosen_taps("hidden", 30, [30]) == (30,)
    for kind, taps in (("taps", [30]), ("hidden", [1, 2]), ("layer", [1]), ("context+taps", [0, 3])):
        with pytest.raises(InputError):
            chosen_taps(kind, 30, taps)


# -- sequence ---------------------------------------------------------------
def test_one_decision_for_the_whole_sequence(tokenizer: Any, rows: RouterRows) -> None:
    embedding = torch.randn(320, 32, generator=torch.Generator().manual_seed(1))
    labelled = [(row, i) for i, name in enumerate(NAMES) for row in rows.train[name]]
    marker = answer_marker(tokenizer)
    assert tokenizer.decode(marker) == "<|im_start|>assistant\n"
    spec, tensors = fit_sequence(embedding, labelled, NAMES, marker=marker)
    stage = SequenceStage(spec, tensors, Surroundings(n_layers=4, embedding=embedding))
    for i, name in enumerate(NAMES):
        for row in rows.held_out[name]:
            ids = row.ids.unsqueeze(0)
            real = torch.ones_like(ids, dtype=torch.bool)
            logp = stage.score(ids, real, stage.start(1))[0].logp[0, :, 0]
            assert (logp == logp[0]).all() and int(logp[0].argmax()) == i
            # what follows the prompt changes nothing, nor do padding and a cut after the prompt
            cut = int(row.completion.int().argmax())
            first, state = stage.score(ids[:, :cut], real[:, :cut], stage.start(1))
            second, _ = stage.score(ids[:, cut:], real[:, cut:], state)
            assert torch.allclose(torch.cat([first.logp, second.logp], 1)[0, :, 0], logp, atol=1e-12)
            padded = torch.nn.functional.pad(ids, (3, 0))
            mask = torch.nn.functional.pad(real, (3, 0), value=False)
            left = stage.score(padded, mask, stage.start(1))[0].logp[0, 3:, 0]
            assert torch.allclose(left, logp, atol=1e-12)


# -- arrow ------------------------------------------------------------------
def test_a_prototype_is_the_top_right_singular_vector() -> None:
    generator = torch.Generator().manual_seed(0)
    A, B = torch.randn(3, 16, generator=generator), torch.randn(12, 3, generator=generator)
    v = prototype(Factors(A, B, 2.0), 0)
    wanted = torch.linalg.svd(B @ A).Vh[0]
    assert float((v @ wanted).abs()) == pytest.approx(1, abs=1e-5) and float(v.abs().max()) == float(v.max())
    # all directions of a plane alike: the seed decides, and the same seed the same way
    A, B = torch.eye(2, 16), torch.eye(12, 2)
    assert torch.equal(prototype(Factors(A, B, 1.0), 1), prototype(Factors(A, B, 1.0), 1))
    assert not torch.equal(prototype(Factors(A, B, 1.0), 1), prototype(Factors(A, B, 1.0), 2))


@pytest.mark.parametrize(("k", "temperature"), [(1, 1.0), (2, 0.7)])
def test_arrow_equals_that_of_peft(
    tiny_llama: Path, make_adapter: Callable[..., Path], tmp_path: Path, k: int, temperature: float
) -> None:
    """Logits agree, so every module of every layer has made the same choices."""
    from peft import ArrowConfig, create_arrow_model
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM

    from molora_cli import RoutedModel
    from molora_cli.core.adapter.factors import load_factors
    from molora_cli.core.adapter.read import read_adapter
    from molora_cli.core.base.structure import read_structure
    from molora_cli.refs import parse_ref

    folders = {}
    for seed, name in enumerate(NAMES):
        made = make_adapter(tiny_llama, name, seed=seed, r=4)
        weights = load_file(made / "adapter_model.safetensors")
        # one clear direction, which 15 rounds of power iteration find
        weights = {
            n: t * torch.tensor([3.0, 1, 1, 1])[:, None] if "lora_A" in n else t for n, t in weights.items()
        }
        save_file(weights, made / "adapter_model.safetensors", metadata={"format": "pt"})
        folders[name] = made

    def base() -> Any:
        return AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32).eval()

    config = ArrowConfig(top_k=k, router_temperature=temperature, rng_seed=0)
    theirs = create_arrow_model(base(), [str(f) for f in folders.values()], config).eval()
    structure = read_structure(tiny_llama)
    factors = {n: load_factors(read_adapter(n, parse_ref(str(f)), structure)) for n, f in folders.items()}
    stage, tensors = fit_arrow(factors, 4, k=k, temperature=temperature)
    router = RouterStack(RouterSpec(stages=[stage]), join_tensors([tensors]), Surroundings(n_layers=4), NAMES)
    model = RoutedModel.from_parts(base(), factors, router=router)
    ids = torch.randint(64, 320, (2, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        wanted, found = theirs(input_ids=ids).logits, model(ids)
        assert float((found.logits - wanted).abs().max()) < 1e-3
        assert len(set(found.trace.indices.flatten().tolist())) > 1
        bare = base()(ids).logits
    assert float((bare - wanted).abs().max()) > 0.05


def test_arrow_refuses_what_has_no_input_vector() -> None:
    head = {"lm_head": Factors(torch.randn(2, 8), torch.randn(9, 2), 1.0)}
    with pytest.raises(InputError, match=r"adapter 'b' also changes lm_head"):
        fit_arrow({"a": {"model.layers.0.q": head["lm_head"]}, "b": head}, 1)


# -- the commands -----------------------------------------------------------
@pytest.fixture(scope="module")
def bundle(
    tiny_llama: Path, make_adapter: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    folder = tmp_path_factory.mktemp("bundles") / "b"
    adapters = [f"{n}={make_adapter(tiny_llama, n, seed=i)}" for i, n in enumerate(NAMES)]
    _run("compose", "-o", folder, "--base", tiny_llama, *adapters)
    return folder


def _run(*line: object) -> Any:
    done = CliRunner().invoke(app, [str(part) for part in line])
    if done.exit_code and isinstance(done.exception, Exception):
        raise done.exception
    return done


def test_the_commands_write_and_show_them(bundle: Path, tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    texts = [{"text": " ".join(r.contents), "label": n} for n in NAMES for r in _chats(n, 14)]
    data.write_text("".join(json.dumps(row) + "\n" for row in texts))
    some = ("--data", data, "--json")
    options = ("--rows", 12, "--mixes", 10, "--steps", 20, *some)
    made = json.loads(_run("train-router", bundle, "--kind", "taps", "--taps", "1,3", *options).stdout)
    assert made["kind"] == "taps" and made["held_out"] and made["domains"]["low"]["accuracy"] > 0.4
    seen = json.loads(_run("inspect", bundle, *some).stdout)
    assert seen["documents"] == 42 and len(seen["stats"]["groups"]) == 2
    for kind in ("context+taps", "sequence"):
        extra = ("--taps", "2") if "taps" in kind else ()
        made = json.loads(_run("train-router", bundle, "--kind", kind, *extra, *options, "--force").stdout)
        assert made["kind"] == kind
    closed = json.loads(_run("attach-router", bundle, "--kind", "taps", *some, "--force").stdout)
    assert closed["held_out_accuracy"]["num"] > 0.5 and closed["tokens"]["num"] > 20
    arrow = json.loads(_run("attach-router", bundle, "--kind", "arrow", "--json", "--force").stdout)
    assert arrow["modules"] == 8
    assert json.loads(_run("inspect", bundle, *some).stdout)["tokens"] == seen["tokens"]
    with pytest.raises(InputError, match="one layer"):
        _run("train-router", bundle, "--kind", "hidden", "--taps", "1,2", *options, "--force")
    with pytest.raises(InputError, match="no layers"):
        _run("train-router", bundle, "--kind", "taps", "--taps", "x", *options, "--force")
