"""Text and image tokens of one sequence: tiny random Chameleon and Emu3, from adapters to generation."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

from molora_cli import load
from molora_cli.app import app
from molora_cli.core.bundle.store import Bundle
from molora_cli.core.router.modality import modality_ids
from molora_cli.errors import MoloraError

VOCABULARY, CODES, IMAGE, ROW_END, FIRST = 320, 16, 7, 6, 8
PROJECTIONS = ["q_proj", "v_proj", "down_proj"]
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.1,
}
VQ = {"embed_dim": 4, "latent_channels": 4, "base_channels": 32, "channel_multiplier": [1, 1]}


def chameleon() -> Any:
    from transformers import ChameleonConfig, ChameleonForConditionalGeneration

    # code 12 is spelt BC
    codes = {f"IMGIMG{''.join(chr(65 + int(d)) for d in f'{i:02d}')}Z": FIRST + i for i in range(CODES)}
    vq = {**VQ, "num_embeddings": CODES, "resolution": 8, "num_res_blocks": 1}
    config = ChameleonConfig(
        **SIZES, num_key_value_heads=4, vocabulary_map={"<s>": 1, "<image>": IMAGE} | codes, vq_config=vq
    )
    return ChameleonForConditionalGeneration(config)


def emu3() -> Any:
    from transformers import Emu3Config, Emu3ForConditionalGeneration

    codes = {f"<|visual token {i:06d}|>": FIRST + i for i in range(CODES)}
    names = {"<image>": IMAGE, "<|extra_200|>": ROW_END} | codes
    vq = {
        **VQ,
        "codebook_size": CODES,
        "num_res_blocks": 1,
        "hidden_size": 32,
        "attn_resolutions": [],
        "temporal_downsample_factor": 1,
    }
    text = {**SIZES, "num_key_value_heads": 2}
    return Emu3ForConditionalGeneration(Emu3Config(vocabulary_map=names, text_config=text, vq_config=vq))


IMAGES = {"chameleon": {*range(IMAGE, FIRST + CODES)}, "emu3": {*range(ROW_END, FIRST + CODES)}}


@pytest.fixture(scope="module", params=["chameleon", "emu3"])
def made(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path
) -> Iterator[tuple[str, Path, Path, dict[str, dict[str, Any]]]]:
    """(name, base folder, bundle, adapter -> module path -> (A, B, scale)); the router is the vocabulary."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    build: Callable[[], Any] = {"chameleon": chameleon, "emu3": emu3}[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    build().save_pretrained(folder / "base")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (folder / "base" / file).write_bytes((tiny_llama / file).read_bytes())
    factors: dict[str, dict[str, Any]] = {}
    for seed, name in enumerate(("text", "image")):
        torch.manual_seed(seed)
        targets = rf".*layers\.\d+\..*({'|'.join(PROJECTIONS)})"
        base = type(build()).from_pretrained(folder / "base")
        peft = get_peft_model(base, LoraConfig(r=2 + seed, lora_alpha=4, target_modules=targets))
        found: dict[str, Any] = {}
        for path, module in peft.base_model.model.named_modules():
            if hasattr(module, "lora_B"):
                nn.init.normal_(module.lora_B["default"].weight, std=0.3)
                weights = (module.lora_A["default"].weight.detach(), module.lora_B["default"].weight.detach())
                found[path] = (*weights, module.scaling["default"])
        factors[name] = found
        peft.save_pretrained(folder / name)
    bundle = folder / "bundle"
    run("compose", "-o", bundle, "--base", folder / "base", f"text={folder / 'text'}",
        f"image={folder / 'image'}")  # fmt: skip
    rules = ("--rule", "image=class:image", "--rule", "text=class:text")
    summary = run("attach-router", bundle, "--kind", "vocab", *rules)
    assert summary["tokens"]["image"] == len(IMAGES[request.param])
    assert summary["tokens"]["text"] == VOCABULARY - len(IMAGES[request.param])
    yield request.param, folder / "base", bundle, factors


def run(*arguments: object, code: int = 0) -> Any:
    """The result of a command as a document, or its error where an exit code is expected."""
    done = CliRunner().invoke(app, [*map(str, arguments), "--json", "-q"])
    if code:
        assert isinstance(done.exception, MoloraError) and done.exception.exit_code == code
        return done.exception
    assert done.exception is None, done.exception
    return json.loads(done.stdout.strip().splitlines()[-1])


def twin(folder: Path, factors: dict[str, dict[str, Any]], images: set[int]) -> Any:
    """The base with every token's own adapter added by hooks of its own: no line of molora's runs."""
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    is_image: list[Tensor] = []

    def note(module: Any, args: Any, kwargs: Any) -> None:
        ids = kwargs["input_ids"]
        is_image[:] = [torch.isin(ids, torch.tensor(sorted(images))).unsqueeze(-1)]

    def adapted(path: str) -> Callable[..., Tensor]:
        def hook(module: Any, args: Any, y: Tensor) -> Tensor:
            text, image = (
                y + scale * (args[0] @ a.T @ b.T) for a, b, scale in (f[path] for f in factors.values())
            )
            return torch.where(is_image[0], image, text)

        return hook

    model.register_forward_pre_hook(note, with_kwargs=True)
    for path in factors["text"]:
        model.get_submodule(path).register_forward_hook(adapted(path))
    return model


def assert_routes(trace: Any, images: set[int]) -> None:
    chosen = [trace.adapters[i] for i in trace.indices[:, 0, 0]]
    assert chosen == ["image" if int(i) in images else "text" for i in trace.token_ids]


@torch.no_grad()
def test_every_token_takes_the_adapter_of_its_kind(made: Any) -> None:
    name, folder, bundle, factors = made
    images, model = IMAGES[name], load(bundle, backend="torch")
    other = twin(folder, factors, images)
    ids = torch.randint(FIRST + CODES, VOCABULARY, (2, 20))
    ids[:, 5:12] = torch.randint(FIRST, FIRST + CODES, (2, 7))
    ids[0, 15] = ROW_END
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    out = model(input_ids=ids, attention_mask=mask)
    want = other(input_ids=ids, attention_mask=mask).logits
    assert (out.logits - want)[mask.bool()].abs().max() < 1e-4
    assert_routes(out.trace, images)
    # interleaved tokens one at a time through the cache
    cached = model(input_ids=ids[:1, :4], use_cache=True)
    for t in range(4, 20):
        cached = model(input_ids=ids[:1, t : t + 1], past_key_values=cached.past_key_values, use_cache=True)
        assert (cached.logits[0, -1] - want[0, t]).abs().max() < 1e-4
        assert_routes(cached.trace, images)


@torch.no_grad()
def test_pixels_and_generation_of_interleaved_tokens(made: Any) -> None:
    name, folder, bundle, factors = made
    images, model = IMAGES[name], load(bundle, backend="torch")
    other = twin(folder, factors, images)
    torch.manual_seed(3)
    ids = torch.randint(FIRST + CODES, VOCABULARY, (1, 12))
    inputs: dict[str, Tensor] = {"pixel_values": torch.randn(1, 3, 8, 8)}
    size = other.model.get_image_tokens(
        inputs["pixel_values"], **({} if name == "chameleon" else {"image_sizes": torch.tensor([[8, 8]])})
    ).numel()
    ids = torch.cat([ids[:, :3], torch.full((1, size), IMAGE), ids[:, 3:]], 1)
    if name == "emu3":
        inputs["image_sizes"] = torch.tensor([[8, 8]])

    def allowed(batch: int, sofar: Tensor) -> list[int]:
        """Three words, then four codes, and so on: models of this kind write both."""
        step = (len(sofar) - ids.shape[1]) % 7
        return list(range(FIRST + CODES, VOCABULARY)) if step < 3 else list(range(FIRST, FIRST + CODES))

    settings = {"max_new_tokens": 21, "do_sample": False, "prefix_allowed_tokens_fn": allowed}
    settings |= {"attention_mask": torch.ones_like(ids), "eos_token_id": None, **inputs}
    text = model.base.generate(input_ids=ids, **settings)
    assert torch.equal(text, other.generate(input_ids=ids, **settings))
    new = text[0, ids.shape[1] :].tolist()
    assert [i in images for i in new] == [step % 7 >= 3 for step in range(21)]
    full = model(input_ids=text)
    assert_routes(full.trace, images)


def test_rules_that_overlap_or_miss_tokens_list_them(made: Any) -> None:
    name, _, bundle, _ = made
    vocab = (bundle, "--kind", "vocab", "--force", "--rule")
    clash = run("attach-router", *vocab, "image=class:image", "--rule", "text=range:9-40", code=2)
    assert "claim the same tokens: 9 " in str(clash)
    missed = run("attach-router", *vocab, "image=class:image", code=2)
    assert f"no rule covers {VOCABULARY - len(IMAGES[name])} of {VOCABULARY} tokens: 0 '<pad>'" in str(missed)
    none = run("attach-router", *vocab, "image=class:audio", "--rest", "text", code=2)
    assert "name no audio tokens" in str(none)


def test_a_rule_first_and_a_gate_for_the_text(made: Any, tmp_path: Path) -> None:
    """Image tokens by rule; what the rule leaves is decided by a learned gate."""
    name, _, bundle, _ = made
    rows = {"text": "abc def", "image": "XYZ 123"}
    for who, text in rows.items():
        (tmp_path / f"{who}.jsonl").write_text(
            "\n".join(json.dumps({"text": f"{text} {i}"}) for i in range(12))
        )
    data = [part for who in rows for part in ("--data", f"{who}={tmp_path / who}.jsonl")]
    run("attach-router", bundle, "--kind", "centroid", *data, "--force")
    done = run("attach-router", bundle, "--kind", "vocab", "--rule", "image=class:image", "--before")
    assert done["kind"] == "vocab+centroid" and done["left"] == VOCABULARY - len(IMAGES[name])
    model = load(bundle, backend="torch")
    letters = [model.tokenizer.convert_tokens_to_ids(c) for c in "XYZ"]
    trace = model(input_ids=torch.tensor([[FIRST, *letters, FIRST + 3]])).trace
    certain = [bool((row == -float("inf")).any()) for row in trace.scores[:, 0]]
    assert certain == [True, False, False, False, True]  # the rule knows one expert, the gate weighs two
    rules = ("--rule", "image=class:image", "--rule", "text=class:text", "--force")
    run("attach-router", bundle, "--kind", "vocab", *rules)
    assert Bundle.open(bundle).router_spec is not None


def test_classes_are_read_from_config_and_token_names() -> None:
    series = {f"<|audio_{i:04d}|>": 100 + i for i in range(12)} | {f"<|image_{i}|>": i for i in range(3)}
    found = modality_ids({"image_token_id": 5, "video_token_index": 6, "audio_token_id": None}, series)
    assert found == {"image": {5}, "video": {6}, "audio": frozenset(range(100, 112))}  # three are no series
    assert modality_ids({"image_token_id": True, "vocabulary_map": "x"}, {}) == {}
