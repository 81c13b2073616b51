"""adapter_config.json: what is read, what is refused and why, and that no pattern in it can hang."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from molora_cli.core.adapter.config import classify
from molora_cli.core.adapter.patterns import TooSlow, full, match_all
from molora_cli.core.adapter.read import read_adapter
from molora_cli.core.base.structure import read_structure
from molora_cli.errors import InputError
from molora_cli.refs import Ref


@pytest.fixture(scope="module")
def source(tiny_llama: Path, make_adapter: Callable[..., Path]) -> Path:
    return make_adapter(tiny_llama, "good")


@pytest.fixture
def folder(source: Path, tmp_path: Path) -> Path:
    """A good adapter to damage."""
    return Path(shutil.copytree(source, tmp_path / "adapter"))


def refused(folder: Path, base: Path, seconds: float = 1.0) -> InputError:
    structure = read_structure(base)
    start = time.perf_counter()
    with pytest.raises(InputError) as caught:
        read_adapter("one", Ref("local", str(folder), path=folder), structure)
    assert time.perf_counter() - start < seconds
    error = caught.value
    assert error.exit_code == 2
    assert error.remedy
    assert len(str(error).splitlines()) <= 3
    assert str(error).replace("\n", "").isprintable()
    return error


TEXTS = {
    "utf16": ('{"peft_type": "LORA"}'.encode("utf-16"), "UTF-16"),
    "latin1": (b'{"peft_type": "LOR\xe9"}', r"UTF-8 at byte 18 \(0xe9\)"),
    "list": (b"[1, 2]", "must hold a JSON object, it holds a list"),
    "text": (b'"LORA"', "it holds a text"),
    "empty": (b"", r"empty \(0 bytes\)"),
    "blank": (b"  \n", "is empty"),
    "comma": (b'{\n "peft_type": "LORA",\n}', "line [23], column"),
    "deep": (b"[" * 20_000 + b"]" * 20_000, "nested too deeply"),
    "huge": (b" " * (9 << 20) + b"{}", "9 MiB"),
    "lfs": (b"version https://git-lfs.github.com/spec/v1\nsize 1049\n", "Git LFS pointer.*1049"),
    "twice": (b'{"r": 4, "r": 8}', "'r' is given twice"),
}


@pytest.mark.parametrize("case", TEXTS)
def test_config_text(case: str, folder: Path, tiny_llama: Path) -> None:
    raw, message = TEXTS[case]
    (folder / "adapter_config.json").write_bytes(raw)
    assert re.search(message, refused(folder, tiny_llama).message)


def test_config_text_accepted(folder: Path, tiny_llama: Path) -> None:
    path = folder / "adapter_config.json"
    text = path.read_bytes()
    for raw in (b"\xef\xbb\xbf" + text, b" " * 200_000 + text, text.replace(b"\n", b"\r\n")):
        path.write_bytes(raw)
        assert len(read_adapter("x", Ref("local", "x", path=folder), read_structure(tiny_llama)).modules) == 8


FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"peft_type": "IA3"}, "peft_type: IA3 is another method"),
    ({"peft_type": "LOHA"}, "LOHA"),
    ({"peft_type": "XLORA"}, "X-LoRA"),
    ({"peft_type": None}, "peft_type is missing"),
    ({"task_type": "SEQ_CLS"}, "task_type: SEQ_CLS"),
    ({"r": 0}, "r: the rank must be from 1"),
    ({"r": -8}, "not -8"),
    ({"r": 8.5}, "whole number, not 8.5"),
    ({"r": True}, "whole number"),
    ({"r": "8"}, "whole number"),
    ({"r": 10**30}, "from 1 to 65536"),
    ({"r": 8}, "says rank 8"),
    ({"lora_alpha": float("nan")}, "lora_alpha: must be a finite number, not nan"),
    ({"lora_alpha": float("inf")}, "finite"),
    ({"lora_alpha": 10**400}, "finite"),
    ({"lora_alpha": 0}, "lora_alpha: is 0"),
    ({"lora_alpha": "16"}, "must be a number"),
    ({"rank_pattern": {"q_proj": 0}}, r"rank_pattern\['q_proj'\]"),
    ({"rank_pattern": [4]}, "rank_pattern: must be an object"),
    ({"rank_pattern": {"q_proj(": 4}}, "no valid regular expression"),
    ({"rank_pattern": {"(.*.*)*(x+x+)+y": 4}}, "takes too long"),
    ({"alpha_pattern": {"q_proj": float("nan")}}, "alpha_pattern"),
    ({"use_rslora": "yes"}, "use_rslora: must be true or false"),
    ({"use_dora": True}, "use_dora is on, but the magnitude"),
    ({"lora_bias": True}, "lora_bias is on, but the bias"),
    ({"bias": "all"}, "bias: 'all' trains"),
    ({"init_lora_weights": "pissa_niter_16"}, "init_lora_weights: 'pissa_niter_16' changed the base"),
    ({"init_lora_weights": "olora"}, "changed the base"),
    ({"init_lora_weights": "loftq"}, "changed the base"),
    ({"init_lora_weights": "mica"}, "is not known"),
    ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "target_parameters"),
    ({"trainable_token_indices": [3]}, "trainable_token_indices"),
    ({"layer_replication": [[0, 3]]}, "layer_replication"),
    ({"alora_invocation_tokens": [1, 2]}, "alora_invocation_tokens"),
    ({"kasa_config": {"beta": 1}}, "kasa_config"),
    ({"use_bdlora": {"a": 1}}, "use_bdlora"),
    ({"enable_lora": [True, False, True]}, "enable_lora"),
    ({"use_hyperlora": True}, "use_hyperlora: this field is not known and active"),
    ({"target_modules": "q_proj("}, "missing \\), unterminated subpattern at position 6"),
    ({"target_modules": "nothing_like_this"}, "'nothing_like_this' matches no module.*lm_head"),
    ({"target_modules": ["z_proj"]}, "matches no module"),
    ({"target_modules": ["to_q", "to_out.0"]}, "image model"),
    ({"target_modules": 5}, "must be a list"),
    ({"target_modules": "a" * 30_000}, "30000 characters"),
    ({"layers_to_transform": ["1"]}, "layer numbers"),
    (
        {"auto_mapping": {"base_model_class": "DinoVisionTransformer", "parent_library": "dinov3"}},
        "auto_mapping",
    ),
]


@pytest.mark.parametrize("number", range(len(FIELDS)))
def test_fields(number: int, folder: Path, tiny_llama: Path) -> None:
    fields, message = FIELDS[number]
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    error = refused(folder, tiny_llama, seconds=5.0 if "long" in message else 1.0)
    assert re.search(message, error.message), error.message
    assert str(path) in error.message or "says rank" in message or "is on" in message or "long" in message


@pytest.mark.parametrize(
    "fields",
    [
        {"init_lora_weights": "gaussian"},
        {"init_lora_weights": False},
        {"task_type": None},
        {"use_rslora": None, "fan_in_fan_out": None, "rank_pattern": None},
        {"loftq_config": {"loftq_bits": 4}},
        {"enable_lora": None, "merge_weights": False},
        {"velora_config": {"x": 1}},
        {"new_field": False, "newer": None, "newest": {}},
        {"target_modules": "all-linear"},
        {"target_modules": None},
        {"base_model_name_or_path": "../../../../etc"},
    ],
)
def test_fields_accepted(fields: dict[str, Any], folder: Path, tiny_llama: Path) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    assert len(read_adapter("x", Ref("local", "x", path=folder), read_structure(tiny_llama)).modules) == 8


def test_several_reasons_are_all_named() -> None:
    verdict = classify({"peft_type": "LORA", "r": 0, "modules_to_save": ["x"], "use_qalora": True})
    assert {r.field for r in verdict.reasons} == {"r", "modules_to_save", "use_qalora"}
    assert verdict.as_dict()["verdict"] == "refused"
    json.dumps(verdict.as_dict())


def test_patterns_are_bounded() -> None:
    names = ["model.layers.0.self_attn.q_proj", "x" * 60]
    assert match_all([full(r".*\.q_proj"), full("x+")], names) == [[True, False], [False, True]]
    start = time.perf_counter()
    with pytest.raises(TooSlow):
        match_all([full("(x+x+)+y")], names)
    assert time.perf_counter() - start < 1
