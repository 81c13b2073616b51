"""Every known adapter that must be exact, to each other format and back, or refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from molora_cli.core.adapter.factors import load_factors
from molora_cli.core.adapter.read import read_adapter
from molora_cli.core.base.structure import read_structure
from molora_cli.core.convert.deltas import relative_errors
from molora_cli.core.convert.plan import Request, plan
from molora_cli.core.convert.run import convert
from molora_cli.core.convert.verify import Probe
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


def test_each_case_to_each_format_and_back(
    cases: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("gguf")
    # the weight changes are compared here; loading a base for each of them would take minutes
    monkeypatch.setattr(Probe, "of", classmethod(lambda cls, work, ticker=None: None))
    done: dict[str, int] = {"mlx": 0, "gguf": 0, "peft": 0, "refused": 0}
    for line in (cases / "INDEX.tsv").read_text().splitlines()[1:]:
        place, base, must = line.split("\t")[:3]
        source, base_path = cases / place, cases / "bases" / base
        one = (source / "adapter_config.json").is_file() or source.suffix == ".gguf"
        if not (one and base_path.is_dir() and must.startswith("exact") and "exact-or" not in must):
            continue
        modules = read_structure(base_path)
        noop = "allow-noop" in must
        before = load_factors(read_adapter("x", parse_ref(str(source)), modules, allow_noop=noop))
        for to in ("peft", "mlx", "gguf"):
            there = tmp_path / f"{place.replace('/', '-')}.{to}"
            expected = next((w for (name, t), w in REFUSED.items() if t == to and name in place), None)
            request = Request(str(source), there, to, base=str(base_path), allow_noop=noop)
            if expected is not None:
                with pytest.raises(InputError, match=expected):
                    plan(request)
                done["refused"] += 1
                continue
            convert(plan(request))
            back = tmp_path / f"{there.name}.back"
            convert(plan(Request(str(there), back, "peft", base=str(base_path), allow_noop=True)))
            after = load_factors(read_adapter("y", parse_ref(str(back)), modules, allow_noop=True))
            worst = max(relative_errors(before, after).values())
            assert worst < 1e-6, (place, to, worst)
            done[to] += 1
    assert min(done.values()) >= 6 and done["peft"] > 25, done
