"""molora add and molora remove: what stays keeps every bit, of adapters and of router columns."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from typer.testing import CliRunner, Result

from molora_cli.app import app
from molora_cli.core.bundle import edit
from molora_cli.core.bundle.store import Bundle
from molora_cli.core.router.spec import RouterSpec, StageSpec
from molora_cli.errors import InputError

TEXTS = {
    "one": ["12 + 30 = 42", "7 * 6 = 42", "100 - 58 = 42", "84 / 2 = 42", "1 + 1 = 2", "9 - 3 = 6"],
    "two": [
        "def add(a, b): return a",
        "for x in range(y): pass",
        "if a: b()",
        "x = y(z)",
        "del a",
        "a[b] = c",
    ],
    "new": [
        "Aspirin Twice Daily",
        "Rest And Water",
        "Fever And Cough",
        "Mild Headache",
        "Sore Throat",
        "No Pain",
    ],
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("rows")
    found = {}
    for name, texts in TEXTS.items():
        found[name] = folder / f"{name}.jsonl"
        found[name].write_text("".join(json.dumps({"text": text * 4}) + "\n" for text in texts))
    return found


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [*map(str, arguments)])


def done(*arguments: object) -> dict[str, object]:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, (result.output, result.exception)
    return json.loads(result.stdout)  # type: ignore[no-any-return]


def refused(*arguments: object) -> str:
    result = run(*arguments)
    assert isinstance(result.exception, InputError), (result.output, result.exception)
    assert result.exception.remedy
    return f"{result.exception.message} {result.exception.remedy}"


def tree(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def centroid(pair: Path, files: dict[str, Path], *names: str) -> None:
    data = [f"--data={name}={files[name]}" for name in names]
    result = run("attach-router", pair, "--kind", "centroid", *data, "--force")
    assert result.exit_code == 0, (result.output, result.exception)


def stage(pair: Path, index: int = 0) -> StageSpec:
    spec = Bundle.open(pair).router_spec
    assert spec is not None
    return spec.stages[index]


def tensors(pair: Path) -> dict[str, np.ndarray]:
    return load_file(pair / "router.safetensors")


# -- add -------------------------------------------------------------------------
def test_the_others_keep_every_byte(pair: Path, trio: dict[str, Path]) -> None:
    (pair / "LICENSE").write_text("mine")
    (pair / "notes").mkdir()
    (pair / "notes" / "a.txt").write_text("also mine")
    before = tree(pair)
    document = done("add", pair, f"new={trio['new']}")
    assert document["written"] and document["kept"] == ["one", "two"]
    entry = document["added"][0]  # type: ignore[index]
    assert entry["effect"]["rms"] > 0 and entry["coverage"]["matched"] == 8
    after = tree(pair)
    changed = {"molora.json", "README.md"}
    assert all(after[p] == data for p, data in before.items() if p not in changed)
    assert set(after) - set(before) == {
        f"adapters/new/adapter_{n}" for n in ("config.json", "model.safetensors")
    }
    bundle = Bundle.open(pair)
    bundle.verify()
    assert bundle.adapters == ("one", "two", "new") and "new" in (pair / "README.md").read_text()
    old = json.loads(before["molora.json"])
    new = json.loads(after["molora.json"])
    assert new["base"] == old["base"] and new["adapters"][:2] == old["adapters"]
    assert [p.name for p in pair.parent.iterdir()] == ["pair"]


def test_add_and_remove_is_nothing(pair: Path, trio: dict[str, Path], files: dict[str, Path]) -> None:
    centroid(pair, files, "one", "two")
    before = tree(pair)
    done("add", pair, f"new={trio['new']}")
    assert tree(pair)["router.safetensors"] == before["router.safetensors"]
    done("remove", pair, "new")
    assert tree(pair) == before


def test_a_centroid_column_from_a_few_examples(
    pair: Path, trio: dict[str, Path], files: dict[str, Path]
) -> None:
    centroid(pair, files, "one", "two")
    before, spec = tensors(pair), stage(pair)
    document = done("add", pair, f"new={trio['new']}", "--data", f"new={files['new']}")
    assert document["router"]["held_out_accuracy"]["new"] > 0.5  # type: ignore[index]
    after = tensors(pair)
    assert stage(pair).experts == ["one", "two", "new"]
    columns = {"weight": 1, "bias": 0, "statistics.count": 0, "statistics.mean": 0}
    for key, old in before.items():
        name = key.removeprefix("stages.0.")
        kept = np.take(after[key], range(2), axis=columns[name]) if name in columns else after[key]
        assert kept.dtype == old.dtype and np.array_equal(kept, old), key
    assert after["stages.0.weight"].shape[1] == 3
    # by the formula: (shrunk covariance)^-1 mean, as fitted with all examples of the first two
    from molora_cli.core.router.moments import Moments

    old_moments = Moments.of_tensors(
        {k.removeprefix("stages.0."): torch.from_numpy(v) for k, v in before.items()}
    )
    pooled = old_moments.scatter / old_moments.count.sum()
    level = pooled.diagonal().mean()
    shrunk = 0.9 * pooled + 0.1 * level * torch.eye(len(pooled), dtype=torch.float64)
    mean = torch.from_numpy(after["stages.0.statistics.mean"][2])
    torch.testing.assert_close(
        torch.from_numpy(after["stages.0.weight"][:, 2]), torch.linalg.solve(shrunk, mean)
    )
    assert stage(pair).params["scatter_tokens"] == float(old_moments.count.sum())
    assert spec.params["tokens"].items() <= stage(pair).params["tokens"].items()

    done("remove", pair, "new")
    again = tensors(pair)
    assert again.keys() == before.keys()
    assert all(np.array_equal(again[k], v) for k, v in before.items())


def test_the_new_column_takes_its_tokens(
    tiny_llama: Path, pair: Path, trio: dict[str, Path], files: dict[str, Path]
) -> None:
    import molora_cli

    centroid(pair, files, "one", "two")
    done("add", pair, f"new={trio['new']}", "--data", f"new={files['new']}")
    model = molora_cli.load(pair)
    shares = {}
    for name in TEXTS:
        ids = model.tokenizer(TEXTS[name][0] * 4, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            trace = model(ids).trace
        shares[name] = float((trace.indices[..., 0] == model.adapters.index(name)).mean())
    assert min(shares.values()) > 0.5, shares


def test_it_says_how_an_adapter_is_reached(pair: Path, trio: dict[str, Path], files: dict[str, Path]) -> None:
    assert "no router yet" in run("add", pair, f"a={trio['new']}").stderr
    centroid(pair, files, "one", "two")
    said = run("add", pair, f"b={trio['new']}").stderr
    assert "by name only" in said and "add it with --data b=FILE" in said
    assert run("attach-router", pair, "--kind", "uniform", "--force").exit_code == 0
    said = run("add", pair, f"c={trio['new']}", "--data", f"c={files['new']}").stderr
    assert "--data was not used" in said and "uniform" in said


def test_what_is_not_added(pair: Path, trio: dict[str, Path], tmp_path: Path) -> None:
    before = tree(pair)
    assert "already" in refused("add", pair, f"One={trio['new']}")
    assert "twice" in refused("add", pair, f"a={trio['new']}", f"A={trio['new']}")
    refused("add", pair, f"new={tmp_path}")
    refused("add", pair, f"new={trio['new']}", "--data", f"one={tmp_path / 'x.jsonl'}")
    refused("add", tmp_path / "nowhere", f"new={trio['new']}")
    document = done("add", pair, f"new={trio['new']}", "--dry-run")
    assert document["written"] is False
    assert tree(pair) == before and [p.name for p in pair.parent.iterdir()] == ["pair"]


def test_a_changed_bundle_is_not_overwritten(
    pair: Path, trio: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    finish = edit._finish

    def meanwhile(*arguments: object) -> None:
        finish(*arguments)  # type: ignore[arg-type]
        manifest = json.loads((pair / "molora.json").read_text())
        (pair / "molora.json").write_text(json.dumps({**manifest, "note": "somebody was here"}))

    monkeypatch.setattr(edit, "_finish", meanwhile)
    assert "meanwhile" in refused("add", pair, f"new={trio['new']}")
    assert json.loads((pair / "molora.json").read_text())["note"] == "somebody was here"
    assert Bundle.open(pair).adapters == ("one", "two")


def test_a_link_to_a_bundle_stays_a_link(pair: Path, trio: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(pair)
    done("add", tmp_path / "link", f"new={trio['new']}")
    assert (tmp_path / "link").is_symlink() and Bundle.open(pair).adapters == ("one", "two", "new")


def test_unknown_fields_survive(pair: Path, trio: dict[str, Path]) -> None:
    manifest = json.loads((pair / "molora.json").read_text())
    manifest |= {"format_version": "1.7", "tomorrow": {"a": 1}}
    (pair / "molora.json").write_text(json.dumps(manifest))
    done("add", pair, f"new={trio['new']}")
    done("remove", pair, "one")
    again = json.loads((pair / "molora.json").read_text())
    assert again["tomorrow"] == {"a": 1} and again["format_version"] == "1.7"


# -- remove ----------------------------------------------------------------------
def test_only_its_folder_goes(pair: Path) -> None:
    before = tree(pair)
    assert done("remove", pair, "one")["kept"] == ["two"]
    after = tree(pair)
    gone = {p for p in before if p.startswith("adapters/one/")}
    assert set(before) - set(after) == gone and len(gone) == 2
    assert all(after[p] == before[p] for p in after if p.startswith("adapters/"))
    assert "only adapter" in refused("remove", pair, "two")
    assert "two" in refused("remove", pair, "three")
    assert tree(pair) == after


def give_router(pair: Path, *stages: tuple[StageSpec, dict[str, np.ndarray]]) -> None:
    named = {f"stages.{i}.{k}": v for i, (_, own) in enumerate(stages) for k, v in own.items()}
    Bundle.open(pair).set_router(RouterSpec(stages=[s for s, _ in stages]), named)


def test_a_context_network_loses_one_output(pair: Path, trio: dict[str, Path]) -> None:
    done("add", pair, f"new={trio['new']}")
    rng = np.random.default_rng(0)
    shapes = {"outer.weight": (3, 8), "outer.bias": (3,), "inner.weight": (8, 12), "statistics.mean": (3, 12)}
    own = {k: rng.normal(size=s).astype(np.float32) for k, s in shapes.items()}
    own["statistics.count"] = np.array([5.0, 6.0, 7.0])
    give_router(pair, (StageSpec(kind="context", experts=["one", "two", "new"], k=3), own))
    document = done("remove", pair, "two")
    assert document["kept"] == ["one", "new"]
    after = tensors(pair)
    assert stage(pair).experts == ["one", "new"] and stage(pair).k == 2
    assert stage(pair).params["scatter_tokens"] == 18
    for name, old in own.items():
        expected = old if name == "inner.weight" else old[[0, 2]]
        assert np.array_equal(after[f"stages.0.{name}"], expected), name


def test_rules_are_not_broken_unasked(pair: Path) -> None:
    table = np.array([0, 1, 1, -1, 0, 2], dtype=np.int32)
    rules = [
        {"expert": "one", "rule": "ids:0,4", "tokens": 2},
        {"expert": "two", "rule": "ids:1,2", "tokens": 2},
        {"expert": "__base__", "rule": "ids:5", "tokens": 1},
    ]
    vocab = StageSpec(kind="vocab", experts=["one", "two", "__base__"], params={"rules": rules, "rest": None})
    uniform = StageSpec(kind="uniform", experts=["one", "two"], k=2)
    give_router(pair, (vocab, {"table": table}), (uniform, {}))
    before = tree(pair)
    said = refused("remove", pair, "one")
    assert "ids:0,4" in said and "--force" in said and tree(pair) == before
    done("remove", pair, "one", "--force")
    assert tensors(pair)["stages.0.table"].tolist() == [1, 0, 0, -1, 1, 1]
    assert stage(pair).experts == ["two", "__base__"]
    assert [r["expert"] for r in stage(pair).params["rules"]] == ["__base__", "two", "__base__"]
    assert stage(pair, 1).experts == ["two"] and stage(pair, 1).k == 1


def test_a_fixed_router_goes_to_the_base(pair: Path, tiny_llama: Path) -> None:
    assert run("attach-router", pair, "--kind", "fixed", "--expert", "one").exit_code == 0
    assert "fixed" in refused("remove", pair, "one")
    done("remove", pair, "two")  # the router does not name it
    assert stage(pair).experts == ["one"]


def test_fixed_weights_move_to_the_base(pair: Path) -> None:
    result = run(
        "attach-router", pair, "--kind", "fixed", *[f"--expert={e}" for e in ("one=1", "two=2", "base=3")]
    )
    assert result.exit_code == 0, result.output
    done("remove", pair, "two", "--force")
    assert stage(pair).experts == ["one", "__base__"] and stage(pair).params["weights"] == [1.0, 5.0]


def test_the_only_expert_of_a_stage(pair: Path) -> None:
    give_router(pair, (StageSpec(kind="uniform", experts=["one"]), {}))
    assert "only expert" in refused("remove", pair, "one")
    done("remove", pair, "one", "--force")
    assert stage(pair).experts == ["__base__"]


def test_an_unknown_kind_is_left_alone(pair: Path) -> None:
    give_router(pair, (StageSpec(kind="oracle", experts=["one", "two"]), {"x": np.zeros(2)}))
    before = tree(pair)
    assert "oracle" in refused("remove", pair, "one", "--force")
    assert tree(pair) == before
