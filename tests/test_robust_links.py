"""Links and paths in manifests that lead out of a bundle: refused, and nothing outside is read or changed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from molora_cli.app import app
from molora_cli.errors import InputError

pytestmark = pytest.mark.slow


def cli(*arguments: object) -> Result:
    return CliRunner().invoke(app, [*map(str, arguments)])


def tree(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.mark.parametrize("place", ["../outside", "adapters/../../outside", "/etc", "adapters/one/../../.."])
def test_paths_out_of_a_bundle(trio: dict[str, Path], pair: Path, tmp_path: Path, place: str) -> None:
    shutil.copytree(trio["one"], tmp_path / "outside")
    manifest = json.loads((pair / "molora.json").read_text())
    manifest["adapters"][0]["folder"] = place
    (pair / "molora.json").write_text(json.dumps(manifest))
    before = tree(tmp_path)
    for arguments in (
        ("add", pair, f"new={trio['new']}"),
        ("remove", pair, "one"),
        ("convert", pair, tmp_path / "new", "--to", "peft"),
    ):
        result = cli(*arguments)
        assert isinstance(result.exception, InputError), (arguments, result.output)
    assert tree(tmp_path) == before


@pytest.mark.parametrize("name", ["../outside", "/etc", "one/..", "", "."])
def test_names_out_of_a_collection(
    tiny_llama: Path, trio: dict[str, Path], tmp_path: Path, name: str
) -> None:
    shutil.copytree(trio["one"], tmp_path / "all" / "one")
    shutil.copytree(trio["one"], tmp_path / "outside")
    (tmp_path / "all" / "adapters.json").write_text(json.dumps({"adapters": [name]}))
    result = cli("convert", tmp_path / "all", tmp_path / "new", "--to", "bundle", "--base", tiny_llama)
    assert isinstance(result.exception, InputError), result.output
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    "what", ["adapters/one", "adapters/one/adapter_model.safetensors", "router.safetensors"]
)
def test_links_out_of_a_bundle(trio: dict[str, Path], pair: Path, tmp_path: Path, what: str) -> None:
    assert cli("attach-router", pair, "--kind", "uniform").exit_code == 0
    target = pair / what
    shutil.move(target, tmp_path / "outside")
    target.symlink_to(tmp_path / "outside")
    before = tree(tmp_path / "pair")
    for arguments in (("remove", pair, "two"), ("add", pair, f"new={trio['new']}", "--dry-run")):
        result = cli(*arguments)
        if what != "router.safetensors" or arguments[0] == "remove":
            assert isinstance(result.exception, InputError), (arguments, result.output)
    assert tree(tmp_path / "pair") == before


def test_strange_files_of_a_bundle_stay_inside(pair: Path, tmp_path: Path) -> None:
    """A link that a user put beside the adapters is kept as a link: what it points at is not copied in."""
    (tmp_path / "secret").write_text("secret")
    (pair / "extra").symlink_to(tmp_path / "secret")
    (pair / "loop").symlink_to(pair / "loop")
    assert cli("remove", pair, "one").exit_code == 0
    assert (pair / "extra").is_symlink() and (pair / "loop").is_symlink()
    assert (tmp_path / "secret").read_text() == "secret"
