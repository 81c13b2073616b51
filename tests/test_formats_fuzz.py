"""Damaged files of every format: read, or refused with a reason, in time and memory, within their folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

import molora_cli
from molora_cli.core.adapter.read import base_named, read_adapter
from molora_cli.core.base.structure import BaseModules, read_structure
from molora_cli.core.bundle.store import Bundle
from molora_cli.core.inspection import adapter_facts
from molora_cli.errors import InputError
from molora_cli.refs import Ref
from molora_cli.text import is_unsafe

gguf = pytest.importorskip("gguf")
SECONDS = 5.0  # of one reading; a sound file takes some milliseconds
MODULES = ("model.layers.0.self_attn.q_proj", "model.layers.3.mlp.down_proj")
FUZZ = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

# an audit hook stays for ever, so one is installed that writes only while somebody listens
_opened: list[str] | None = None


def _listen(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and _opened is not None and isinstance(arguments[0], str | bytes | os.PathLike):
        _opened.append(os.fsdecode(arguments[0]))


sys.addaudithook(_listen)


@contextmanager
def only_below(*folders: Path) -> Iterator[None]:
    """Fails where a file outside of these folders, and of Python's own, is opened."""
    global _opened
    _opened = []
    try:
        yield
    finally:
        names, _opened = _opened, None
    code = (sys.prefix, sys.base_prefix, *molora_cli.__path__, *sys.path)
    own = [Path(p).resolve() for p in code if p and Path(p).is_dir()]
    allowed = [f.resolve() for f in folders] + own + [Path("/dev"), Path("/proc"), Path("/sys")]
    outside = [n for n in names if not any(Path(n).resolve().is_relative_to(a) for a in allowed)]
    assert not outside, outside


def factors(base: BaseModules, rank: int = 4) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    random = np.random.default_rng(0)
    return {
        m: (
            random.standard_normal((rank, base[m].in_features)).astype(np.float32),
            random.standard_normal((base[m].out_features, rank)).astype(np.float32),
        )
        for m in MODULES
    }


def write_peft(folder: Path, base: BaseModules) -> str:
    tensors = {}
    for module, (a, b) in factors(base).items():
        tensors[f"base_model.model.{module}.lora_A.weight"] = a
        tensors[f"base_model.model.{module}.lora_B.weight"] = b
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"],
        "rank_pattern": {"q_proj": 4}, "base_model_name_or_path": "../../../etc", "task_type": "CAUSAL_LM",
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return "adapter_model.safetensors"


def write_mlx(folder: Path, base: BaseModules, npz: bool = False) -> str:
    tensors = {}
    for module, (a, b) in factors(base).items():
        tensors[f"{module}.lora_a"] = np.ascontiguousarray(a.T)
        tensors[f"{module}.lora_b"] = np.ascontiguousarray(b.T)
    if npz:
        np.savez(folder / "adapters.npz", **tensors)
    else:
        save_file(tensors, folder / "adapters.safetensors")
    config = {"model": "/etc/passwd", "lora_parameters": {"rank": 4, "scale": 2.0}, "num_layers": -1}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return "adapters.npz" if npz else "adapters.safetensors"


def write_gguf(folder: Path, base: BaseModules) -> str:
    writer = gguf.GGUFWriter(folder / "one.gguf", "llama")
    writer.add_string("general.type", "adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", 8.0)
    writer.add_array("general.tags", ["a", "b"])
    writer.add_array("general.numbers", list(range(2000)))
    names = {MODULES[0]: "blk.0.attn_q", MODULES[1]: "blk.3.ffn_down"}
    for module, (a, b) in factors(base, 32).items():
        writer.add_tensor(f"{names[module]}.weight.lora_a", a)
        packed = gguf.quants.quantize(b, gguf.GGMLQuantizationType.Q8_0)
        writer.add_tensor(f"{names[module]}.weight.lora_b", packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return "one.gguf"


WRITERS: dict[str, Callable[[Path, BaseModules], str]] = {
    "peft": write_peft,
    "mlx": write_mlx,
    "npz": lambda folder, base: write_mlx(folder, base, npz=True),
    "gguf": write_gguf,
}


@pytest.fixture(scope="module")
def base(tiny_llama: Path) -> BaseModules:
    return read_structure(tiny_llama)


@pytest.fixture(scope="module", params=list(WRITERS))
def sound(
    request: pytest.FixtureRequest, base: BaseModules, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A sound file of one format, in a folder of its own; it is restored by every test that damages it."""
    folder = tmp_path_factory.mktemp(request.param)
    name = WRITERS[request.param](folder, base)
    return folder / name


def try_all(folder: Path, base: BaseModules) -> bool:
    """Reads what lies there in every way there is; True where it was accepted."""
    ref = Ref("local", str(folder), path=folder)
    start = time.perf_counter()
    accepted = 0
    with only_below(folder, base.path):
        for attempt in (
            lambda: read_adapter("one", ref, base),
            lambda: read_adapter("one", ref, base, allow_noop=True, saved_rank=2),
            lambda: base_named(ref),
            lambda: json.dumps(adapter_facts(folder), allow_nan=False),
        ):
            try:
                attempt()
                accepted += 1
            except InputError as error:
                assert error.message and len(str(error).splitlines()) <= 3
                assert not [c for c in str(error) if is_unsafe(c) and c != "\n"]
    assert time.perf_counter() - start < 4 * SECONDS  # of four readings
    return accepted == 4


def test_sound_files_are_accepted(sound: Path, base: BaseModules) -> None:
    assert try_all(sound.parent, base)


@FUZZ
@given(
    at=st.integers(0, 1 << 20),
    flips=st.binary(min_size=1, max_size=12),
    start_only=st.booleans(),
    cut=st.none() | st.integers(0, 1 << 20),
)
def test_damaged_weights(
    at: int, flips: bytes, start_only: bool, cut: int | None, sound: Path, base: BaseModules
) -> None:
    raw = sound.read_bytes()
    try:
        damaged = bytearray(raw)
        at %= min(len(raw), 600) if start_only else len(raw)
        damaged[at : at + len(flips)] = flips
        sound.write_bytes(damaged[: cut % len(raw)] if cut is not None else damaged)
        try_all(sound.parent, base)
    finally:
        sound.write_bytes(raw)


@FUZZ
@given(
    raw=st.binary(max_size=300),
    head=st.sampled_from([b"", b"GGUF\3\0\0\0", b"PK\3\4", b"{", b"\x40" + b"\0" * 7 + b'{"']),
)
def test_random_weights(raw: bytes, head: bytes, sound: Path, base: BaseModules) -> None:
    kept = sound.read_bytes()
    try:
        sound.write_bytes(head + raw)
        assert not try_all(sound.parent, base)
    finally:
        sound.write_bytes(kept)


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=12)
    | st.sampled_from(["../../x", "(a+)+$", "q_proj", "all-linear", "lora", "dora", "\x1b[2J"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


@settings(FUZZ, max_examples=25)  # a pattern out of a config runs in a process of its own
@given(data=st.data())
def test_any_config(data: st.DataObject, sound: Path, base: BaseModules) -> None:
    file = sound.parent / "adapter_config.json"
    if not file.exists():
        return
    kept = file.read_bytes()
    config = json.loads(kept)
    fields = [*config, "use_dora", "lora_bias", "modules_to_save", "alpha_pattern", "layers_to_transform"]
    for name in data.draw(st.lists(st.sampled_from(fields), min_size=1, max_size=3)):
        config[name] = data.draw(VALUES)
    try:
        file.write_text(json.dumps(config))
        try_all(sound.parent, base)
        file.write_bytes(data.draw(st.binary(max_size=60)) + kept[: data.draw(st.integers(0, 400))])
        try_all(sound.parent, base)
    finally:
        file.write_bytes(kept)


@pytest.fixture(scope="module")
def bundle(tiny_llama: Path, base: BaseModules, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from molora_cli.core.compose import Request, compose, plan

    source = tmp_path_factory.mktemp("source")
    write_peft(source, base)
    target = tmp_path_factory.mktemp("made") / "bundle"
    compose(
        plan(Request(output=target, adapters=(("one", str(source)),), base=str(tiny_llama), same_base=True))
    )
    return target


@FUZZ
@given(data=st.data())
def test_any_manifest(data: st.DataObject, bundle: Path, tiny_llama: Path) -> None:
    file = bundle / "molora.json"
    kept = file.read_bytes()
    document = json.loads(kept)
    places: list[dict[str, Any]] = [document, document["base"], *document["adapters"]]
    try:
        if data.draw(st.booleans()):
            place = data.draw(st.sampled_from(places))
            place[data.draw(st.sampled_from(sorted(place)))] = data.draw(
                VALUES | st.sampled_from(["../../etc/passwd", "/etc/passwd", "adapters/one/../../..", "a\0b"])
            )
            file.write_text(json.dumps(document))
        else:
            at = data.draw(st.integers(0, len(kept) - 1))
            file.write_bytes(kept[:at] + data.draw(st.binary(max_size=6)) + kept[at + 2 :])
        start = time.perf_counter()
        with only_below(bundle, tiny_llama):
            try:
                found = Bundle.open(bundle)
                for name in found.adapters:
                    assert found.folder(name).resolve().is_relative_to(bundle.resolve())
                found.verify()
            except InputError as error:
                assert error.message
        assert time.perf_counter() - start < SECONDS
    finally:
        file.write_bytes(kept)


def router(folder: Path) -> Path:
    """A router file of three kinds of stages for one expert on a vocabulary of 320."""
    from molora_cli.core.router.files import save
    from molora_cli.core.router.spec import RouterSpec, StageSpec

    random = np.random.default_rng(0)
    rules = [{"expert": "one", "rule": "ids:0,4", "tokens": 2}]
    shapes = {"outer.weight": (2, 8), "outer.bias": (2,), "inner.weight": (8, 12), "statistics.mean": (2, 12)}
    vocab = {"table": np.zeros(320, np.int32)}
    context = {name: random.standard_normal(size).astype(np.float32) for name, size in shapes.items()}
    stages = (
        (StageSpec(kind="vocab", experts=["one"], params={"rules": rules, "rest": None}), vocab),
        (StageSpec(kind="context", experts=["one", "__base__"], groups=[(0, 4)]), context),
        (StageSpec(kind="fixed", experts=["one"], params={"weights": [1.0]}), {}),
    )  # fmt: skip
    tensors = {f"stages.{i}.{k}": v for i, (_, own) in enumerate(stages) for k, v in own.items()}
    save(folder / "router.safetensors", RouterSpec(stages=[stage for stage, _ in stages]), tensors)
    return folder / "router.safetensors"


@FUZZ
@given(data=st.data())
def test_any_router(data: st.DataObject, tmp_path: Path) -> None:
    """A router's header and file: read, or refused; and a stack is built of what was read, or refused."""
    import torch

    from molora_cli.core.router.files import load_tensors
    from molora_cli.core.router.kinds import Surroundings
    from molora_cli.core.router.spec import read_spec
    from molora_cli.core.router.stack import RouterStack
    from molora_cli.errors import MoloraError

    file = router(tmp_path)
    raw = file.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    if data.draw(st.booleans()):
        header = json.loads(raw[8 : 8 + size])
        spec = json.loads(header["__metadata__"]["molora_router"])
        place = data.draw(st.sampled_from([spec, *spec["stages"], *(s["params"] for s in spec["stages"])]))
        place[data.draw(st.sampled_from([*sorted(place), "x"]))] = data.draw(VALUES)
        header["__metadata__"]["molora_router"] = json.dumps(spec)
        text = json.dumps(header).encode()
        file.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + size :])
    else:
        at = data.draw(st.integers(0, len(raw) - 1))
        file.write_bytes(
            raw[:at] + data.draw(st.binary(max_size=6)) + raw[at + data.draw(st.integers(0, 4)) :]
        )
    around = Surroundings(n_layers=4, embedding=torch.zeros(320, 12))
    start = time.perf_counter()
    with only_below(tmp_path):
        try:
            RouterStack(read_spec(file), load_tensors(file), around, ["one"])
        except MoloraError as error:
            assert error.message and not [c for c in error.message if is_unsafe(c)]
    assert time.perf_counter() - start < SECONDS


def test_memory_and_time_of_refusals(base: BaseModules, tmp_path: Path) -> None:
    """Files that claim to be huge cost neither memory nor time, in a fresh process."""
    big = tmp_path / "sparse.gguf"
    write_gguf(tmp_path, base)
    raw = (tmp_path / "one.gguf").read_bytes()
    (tmp_path / "one.gguf").unlink()
    with big.open("wb") as handle:  # a list of 2^31 numbers in a file with a hole of 3 GB
        handle.write(raw[:16] + (1).to_bytes(8, "little") + (1).to_bytes(8, "little") + b"x")
        handle.write((9).to_bytes(4, "little") + (8).to_bytes(4, "little") + (2**31).to_bytes(8, "little"))
        handle.truncate(3 << 30)
    zeros = tmp_path / "zeros"
    zeros.mkdir()
    write_peft(zeros, base)
    shape = [1 << 20, 1 << 10]
    header = {"a.lora_A.weight": {"dtype": "F16", "shape": shape, "data_offsets": [0, 2 << 30]}}
    text = json.dumps(header).encode()
    with (zeros / "adapter_model.safetensors").open("wb") as handle:
        handle.write(len(text).to_bytes(8, "little") + text)
        handle.truncate(8 + len(text) + (2 << 30))
    script = (
        "import resource, sys, time; from pathlib import Path\n"
        "from molora_cli.core.adapter.read import read_adapter\n"
        "from molora_cli.core.base.structure import read_structure\n"
        "from molora_cli.errors import InputError\nfrom molora_cli.refs import Ref\n"
        "base = read_structure(Path(sys.argv[1]))\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "for name in sys.argv[2:]:\n"
        "    start = time.perf_counter()\n"
        "    try: read_adapter('x', Ref('local', name, path=Path(name)), base); print('accepted', name)\n"
        "    except InputError as error: print(error.message)\n"
        "    if time.perf_counter() - start > 2: print('slow', name)\n"
        "assert 'torch' not in sys.modules\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(base.path), str(big), str(zeros)],
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    lines = done.stdout.splitlines()
    assert "claims a list of 2147483648" in lines[0] and "lora_B" in lines[1], lines
    assert not [line for line in lines if line.startswith(("accepted", "slow"))]
    assert int(lines[-1]) < 100_000  # kB
