"""molora compose: adapters to one bundle, or a refusal that writes nothing."""

from __future__ import annotations

import errno
import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner, Result

from molora_cli.app import app
from molora_cli.core.bundle.store import Bundle, default_bundle
from molora_cli.core.compose import Request, choose_base, parse_adapters
from molora_cli.core.effect import measure_effects, probe_ids
from molora_cli.errors import InputError
from molora_cli.recipes import load_recipe, merge

Make = Callable[..., Path]


@pytest.fixture(scope="module")
def pair(tiny_llama: Path, make_adapter: Make) -> dict[str, Path]:
    """Two adapters that differ in rank, alpha, scale rule and targets."""
    return {
        "one": make_adapter(tiny_llama, "one", seed=1),
        "two": make_adapter(
            tiny_llama,
            "two",
            seed=2,
            r=6,
            lora_alpha=3,
            use_rslora=True,
            target_modules=["up_proj", "q_proj"],
            rank_pattern={"layers.1.mlp.up_proj": 2},
        ),
    }


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["compose", *map(str, arguments)])


def refused(*arguments: object) -> InputError:
    result = run(*arguments)
    assert isinstance(result.exception, InputError), result.output
    assert result.exception.exit_code == 2
    return result.exception


def test_a_bundle_of_two(tiny_llama: Path, pair: dict[str, Path], tmp_path: Path) -> None:
    target = tmp_path / "out" / "bundle"
    result = run("-o", target, "--base", tiny_llama, f"one={pair['one']}", pair["two"], "--json", "-q")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["schema_version"] == 1 and document["written"] is True
    assert [a["name"] for a in document["adapters"]] == ["one", "two"]
    two = document["adapters"][1]
    layer = two["modules"]["model.layers.1.mlp.up_proj"]
    assert layer["rank"] == 2 and layer["scale"] == pytest.approx(3 / 2**0.5)
    assert two["modules"]["model.layers.0.mlp.up_proj"]["scale"] == pytest.approx(3 / 6**0.5)
    assert two["coverage"] == {"matched": 8, "in_file": 8, "in_base": 29}
    assert two["effect"]["rms"] > 0 and "built-in text" in two["effect"]["probe"]

    bundle = Bundle.open(target)
    bundle.verify()
    assert bundle.adapters == ("one", "two") and bundle.base_path == tiny_llama.resolve()
    assert sorted(p.name for p in target.iterdir()) == ["README.md", "adapters", "molora.json"]
    assert [p.name for p in target.parent.iterdir()] == ["bundle"]
    assert bundle.manifest.base.fingerprint.samples.keys() >= {"model.embed_tokens"}
    assert "# bundle" in (target / "README.md").read_text()


def test_every_adapter_opens_in_peft_as_before(
    tiny_llama: Path, pair: dict[str, Path], tmp_path: Path
) -> None:
    target = tmp_path / "bundle"
    assert (
        run("-o", target, "--base", tiny_llama, *[f"{n}={p}" for n, p in pair.items()], "-q").exit_code == 0
    )
    ids = torch.arange(64, 96)[None]
    for name, source in pair.items():
        logits = []
        for folder in (source, target / "adapters" / name):
            model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_llama), folder).eval()
            with torch.no_grad():
                logits.append(model(ids).logits)
        assert torch.equal(*logits), name
        recorded = load_file(source / "adapter_model.safetensors")
        assert recorded.keys() == load_file(target / "adapters" / name / "adapter_model.safetensors").keys()


def test_the_effect_is_that_of_peft(tiny_llama: Path, pair: dict[str, Path], tmp_path: Path) -> None:
    target = tmp_path / "bundle"
    assert run("-o", target, "--base", tiny_llama, f"two={pair['two']}", "-q").exit_code == 0
    from transformers import AutoTokenizer

    ids, _ = probe_ids(AutoTokenizer.from_pretrained(tiny_llama), 320, 256)
    base = AutoModelForCausalLM.from_pretrained(tiny_llama).eval()
    with torch.no_grad():
        plain = base(ids).logits.double()
        moved = PeftModel.from_pretrained(base, pair["two"]).eval()(ids).logits.double() - plain
    effect = Bundle.open(target).entry("two").effect
    assert effect is not None
    assert effect.max_abs == pytest.approx(moved.abs().max().item(), rel=1e-3)
    assert effect.rms == pytest.approx(moved.square().mean().sqrt().item(), rel=1e-3)
    assert effect.base_rms == pytest.approx(plain.square().mean().sqrt().item(), rel=1e-6)


def test_measuring_leaves_the_base_as_it_was(tiny_llama: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_llama).eval()
    before = {name: type(module) for name, module in model.named_modules()}
    assert measure_effects(model, None, []) == {}
    with pytest.raises(InputError):
        measure_effects(model, None, [("x", {"no.such.module": None})])  # type: ignore[dict-item]
    assert {name: type(module) for name, module in model.named_modules()} == before


# -- refusals: nothing is written ----------------------------------------------
def zero_b(source: Path, folder: Path, factor: float = 0.0) -> Path:
    shutil.copytree(source, folder)
    tensors = load_file(folder / "adapter_model.safetensors")
    changed = {k: t * factor if "lora_B" in k else t for k, t in tensors.items()}
    save_file(changed, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    return folder


def test_an_adapter_without_effect(tiny_llama: Path, pair: dict[str, Path], tmp_path: Path) -> None:
    idle = zero_b(pair["one"], tmp_path / "idle")
    target = tmp_path / "bundle"
    error = refused("-o", target, "--base", tiny_llama, f"idle={idle}")
    assert "changes nothing" in error.message and "--allow-noop" in error.remedy
    assert not target.exists()
    result = run("-o", target, "--base", tiny_llama, f"idle={idle}", "--allow-noop")
    assert result.exit_code == 0, result.output
    assert Bundle.open(target).entry("idle").effect.max_abs == 0  # type: ignore[union-attr]


def test_an_effect_lost_in_rounding_is_an_error_too(
    tiny_llama: Path, pair: dict[str, Path], tmp_path: Path
) -> None:
    tiny = zero_b(pair["one"], tmp_path / "tiny", 1e-20)
    error = refused("-o", tmp_path / "b", "--base", tiny_llama, f"tiny={tiny}")
    assert "changes no logit" in error.message
    assert sorted(p.name for p in tmp_path.iterdir()) == ["tiny"]


def test_names_used_twice(tiny_llama: Path, pair: dict[str, Path], tmp_path: Path) -> None:
    for folder in ("a", "b"):
        shutil.copytree(pair["one"], tmp_path / folder / "expert")
    places = [tmp_path / "a" / "expert", tmp_path / "b" / "expert"]
    error = refused("-o", tmp_path / "out", "--base", tiny_llama, *places)
    assert "name expert is used twice" in error.message and "name=path" in error.remedy
    assert all(str(p) in error.message for p in places)
    with pytest.raises(InputError, match="only the case differs"):
        parse_adapters(["math=a/b", "Math=a/c"])
    with pytest.raises(InputError, match="no adapter"):
        parse_adapters([])


@pytest.mark.parametrize("name", ["with.dot", "with space", "-leading", "base", "emoji-😀"])
def test_odd_folder_names_need_a_name(name: str, tmp_path: Path) -> None:
    (tmp_path / name).mkdir()
    with pytest.raises(InputError) as caught:
        parse_adapters([str(tmp_path / name)])
    assert "=" in caught.value.remedy
    assert parse_adapters([f"fine={tmp_path / name}"])[0][0] == "fine"


def test_an_adapter_given_as_a_file(pair: dict[str, Path]) -> None:
    pairs = parse_adapters([str(pair["one"] / "adapter_model.safetensors")])
    assert pairs == (("one", str(pair["one"])),)


def set_base(folder: Path, source: Path, base: str) -> Path:
    shutil.copytree(source, folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": base}))
    return folder


def test_adapters_of_different_bases(tiny_llama: Path, pair: dict[str, Path], tmp_path: Path) -> None:
    other = set_base(tmp_path / "other", pair["two"], "org/another-model")
    arguments = ("-o", tmp_path / "b", "--base", tiny_llama, f"one={pair['one']}", f"other={other}")
    error = refused(*arguments)
    assert "bases differ" in error.message and "org/another-model" in error.message
    assert run(*arguments, "--same-base", "-q").exit_code == 0
    packed = set_base(tmp_path / "packed", pair["two"], "unsloth/tiny-llama-bnb-4bit")
    request = Request(tmp_path / "c", (("one", str(pair["one"])), ("p", str(packed))), base=str(tiny_llama))
    assert choose_base(request).path == tiny_llama


def test_the_base_of_a_config_is_used_only_as_a_hub_id(
    pair: dict[str, Path], tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # the adapter's own config names a folder that exists; it must not be looked up
    error = refused("-o", tmp_path / "b", f"one={pair['one']}")
    assert "base is not known" in error.message and "--base" in error.remedy
    hub = set_base(tmp_path / "hub", pair["one"], "org/tiny")
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny_llama, tmp_path / "org" / "tiny")  # a hub id in a stranger's file stays one
    ref = choose_base(Request(tmp_path / "b", (("hub", str(hub)),)))
    assert (ref.kind, ref.repo) == ("hub", "org/tiny")
    error = refused("-o", tmp_path / "b", f"hub={hub}")
    assert "offline" in error.message


def test_a_wrong_base_is_refused(pair: dict[str, Path], tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "vocab_size": 320}
    LlamaForCausalLM(LlamaConfig(num_hidden_layers=4, **sizes)).save_pretrained(tmp_path / "small")
    error = refused("-o", tmp_path / "b", "--base", tmp_path / "small", f"one={pair['one']}")
    assert "64" in error.message and "32" in error.message
    assert not (tmp_path / "b").exists()


def tree(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.mark.parametrize("force", [False, True])
def test_outputs_that_overlap_inputs(
    tiny_llama: Path, pair: dict[str, Path], tmp_path: Path, force: bool
) -> None:
    source = tmp_path / "in" / "one"
    shutil.copytree(pair["one"], source)
    before = tree(tmp_path)
    for output in (source, source / "b", tmp_path / "in", tmp_path / "in" / "one" / "adapter_config.json"):
        refused("-o", output, "--base", tiny_llama, f"one={source}", *(["--force"] if force else []))
    refused("-o", tiny_llama / "b", "--base", tiny_llama, f"one={source}")
    assert tree(tmp_path) == before and not (tiny_llama / "b").exists()


def test_force_replaces_and_refusals_keep_the_old(
    tiny_llama: Path, pair: dict[str, Path], tmp_path: Path
) -> None:
    target = tmp_path / "b"
    assert run("-o", target, "--base", tiny_llama, f"one={pair['one']}", "-q").exit_code == 0
    before = tree(target)
    assert "--force" in refused("-o", target, "--base", tiny_llama, f"two={pair['two']}").remedy
    idle = zero_b(pair["one"], tmp_path / "idle", 1e-20)
    refused("-o", target, "--base", tiny_llama, f"idle={idle}", "--force")
    assert tree(target) == before
    assert run("-o", target, "--base", tiny_llama, f"two={pair['two']}", "--force", "-q").exit_code == 0
    assert Bundle.open(target).adapters == ("two",)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["b", "idle"]


def test_a_full_disk_while_writing(
    tiny_llama: Path, pair: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("molora_cli.core.compose.write_peft", full)
    result = run("-o", tmp_path / "b", "--base", tiny_llama, f"one={pair['one']}")
    assert "no space left" in str(result.exception)
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_compose(tiny_llama: Path, pair: dict[str, Path], tmp_path: Path) -> None:
    """SIGINT while the folder is being filled: exit 130, nothing left."""
    code = (
        "import molora_cli.core.compose as c, time\n"
        "from molora_cli.core.bundle.manifest import Effect\n"
        "effect = Effect(max_abs=1, rms=1, base_rms=1)\n"
        "c.measure_effect = lambda work, ticker: ({a.name: effect for a in work.adapters}, {})  # quick\n"
        "def slow(*_):\n    print('writing', flush=True)\n    time.sleep(60)\n"
        "c.write_peft = slow\n"
        "from molora_cli.app import main\nmain()\n"
    )
    arguments = ["compose", "-o", str(tmp_path / "b"), "--base", str(tiny_llama), f"one={pair['one']}", "-q"]
    process = subprocess.Popen(
        [sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "writing\n"
    assert list(tmp_path.iterdir())
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in stderr
    assert list(tmp_path.iterdir()) == []


# -- dry run, recipe, default ----------------------------------------------------
def test_a_dry_run_writes_nothing_and_says_where_values_come_from(
    tiny_llama: Path, pair: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "compose:\n  output: made\n  base: nowhere/at-all\n  allow_noop: true\n  adapters: {a: b/c}\n"
    )
    monkeypatch.setenv("MOLORA_BASE", str(tiny_llama))
    arguments = ("--recipe", recipe, f"one={pair['one']}", "--dry-run")
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    sources = {name: setting["source"] for name, setting in document["settings"].items()}
    expected = {
        "output": "recipe",
        "base": "environment (MOLORA_BASE)",
        "adapters": "flag",
        "allow_noop": "recipe",
        "same_base": "default",
    }
    assert {name: sources[name] for name in expected} == expected
    assert document["settings"]["output"]["value"] == str(tmp_path / "made")
    sizes = {file["path"]: file["bytes"] for file in document["files"]}
    weights = "adapters/one/adapter_model.safetensors"
    assert sizes[weights] == (pair["one"] / "adapter_model.safetensors").stat().st_size
    assert document["bytes"] == sum(sizes.values())
    assert "(recipe)" in run(*arguments).stdout
    assert [p.name for p in tmp_path.iterdir()] == ["recipe.yaml"]


def test_a_recipe_composes_and_makes_the_default(
    tiny_llama: Path, pair: dict[str, Path], tmp_path: Path
) -> None:
    shutil.copytree(pair["one"], tmp_path / "adapters" / "one")
    (tmp_path / "r.yaml").write_text(
        f"compose:\n  output: made\n  base: {tiny_llama}\n  default: true\n"
        "  adapters:\n    math: adapters/one\n"
    )
    assert run("--recipe", tmp_path / "r.yaml", "-q").exit_code == 0
    assert default_bundle() == (tmp_path / "made").resolve()
    assert Bundle.open(tmp_path / "made").adapters == ("math",)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("compose: {bass: x}", "bass: no such option"),
        ("compose: {adapters: [a]}", "adapters"),
        ("train: {}", "nothing for 'compose'.*train"),
        ("- 1", "nothing for 'compose'"),
        ("compose: [", "line 1"),
        ("compose: !!python/object/apply:os.system [true]", "not YAML"),
        ("compose: {output: 3}", "output"),
    ],
)
def test_bad_recipes(tmp_path: Path, text: str, message: str) -> None:

    (tmp_path / "r.yaml").write_text(text)
    with pytest.raises(InputError, match=message):
        load_recipe(tmp_path / "r.yaml", "compose")


def test_precedence(monkeypatch: pytest.MonkeyPatch) -> None:
    defaults: dict[str, Any] = {"alpha": 1, "beta": 2, "gamma": False, "delta": 0.5, "names": []}
    monkeypatch.setenv("MOLORA_ALPHA", "10")
    monkeypatch.setenv("MOLORA_BETA", "20")
    monkeypatch.setenv("MOLORA_GAMMA", "yes")
    monkeypatch.setenv("MOLORA_NAMES", "ignored")
    merged = merge(
        {"alpha": 100, "names": []}, {"alpha": 3, "beta": 4, "delta": 0.25, "names": ["x"]}, defaults
    )
    assert {name: s.value for name, s in merged.items()} == {
        "alpha": 100,
        "beta": 20,
        "gamma": True,
        "delta": 0.25,
        "names": ["x"],
    }
    monkeypatch.setenv("MOLORA_BETA", "many")
    with pytest.raises(InputError, match="MOLORA_BETA=many is not a number"):
        merge({}, {}, defaults)


# -- the known cases -------------------------------------------------------------
def test_cases_that_must_compose_or_be_refused(cases: Path, tmp_path: Path) -> None:
    """Every row of the index that is an adapter of a base in the folder: its `must` column decides."""
    tried = {"exact": 0, "refused": 0}
    for line in (cases / "INDEX.tsv").read_text().splitlines()[1:]:
        place, base, must = line.split("\t")[:3]
        folder = cases / place
        if not (folder / "adapter_config.json").is_file() or not (cases / "bases" / base).is_dir():
            continue
        wanted = (
            "refused"
            if must == "refused"
            else "exact"
            if must.startswith("exact") and "or" not in must
            else ""
        )
        if not wanted:
            continue
        result = run(
            "-o", tmp_path / place, "--base", cases / "bases" / base, f"x={folder}", "-q",
            *(["--allow-noop"] if "allow-noop" in must else []), "--dry-run",
        )  # fmt: skip
        if wanted == "refused":
            assert isinstance(result.exception, InputError), (place, result.output)
        else:
            assert result.exit_code == 0, (place, result.exception)
        tried[wanted] += 1
    assert tried["exact"] > 15 and tried["refused"] > 10, tried
    assert not list(tmp_path.iterdir())
