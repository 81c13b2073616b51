"""Opening bundles, refusing what is not whole, and writing them whole or not at all."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from molora_cli.core.bundle import writing
from molora_cli.core.bundle.card import render_card
from molora_cli.core.bundle.manifest import AdapterEntry, BaseEntry, Manifest
from molora_cli.core.bundle.store import (
    Bundle,
    default_bundle,
    dump_manifest,
    set_default_bundle,
    sha256_file,
)
from molora_cli.core.bundle.writing import MARKER, check_target, new_file, new_folder
from molora_cli.core.router.spec import RouterSpec, StageSpec
from molora_cli.errors import InputError, MoloraError

FIXTURE = Path(__file__).parent / "fixtures" / "bundle-v1"


def make_bundle(folder: Path, names: tuple[str, ...] = ("math", "code")) -> Path:
    """A bundle whose adapters are only files with a digest: enough for everything but arithmetic."""
    entries = []
    for name in names:
        place = folder / "adapters" / name
        place.mkdir(parents=True)
        (place / "adapter_config.json").write_text("{}")
        (place / "adapter_model.safetensors").write_bytes(name.encode())
        digest = sha256_file(place / "adapter_model.safetensors")
        entries.append(
            AdapterEntry(name=name, folder=f"adapters/{name}", source=f"org/{name}", sha256=digest)
        )
    manifest = Manifest(created_by="molora 0", base=BaseEntry(id="org/base"), adapters=entries)
    (folder / "molora.json").write_text(dump_manifest(manifest))
    return folder


def edit(folder: Path, **changes: Any) -> None:
    raw = json.loads((folder / "molora.json").read_text())
    raw.update(changes)
    (folder / "molora.json").write_text(json.dumps(raw))


def edit_adapter(bundle: Path, **changes: Any) -> None:
    raw = json.loads((bundle / "molora.json").read_text())
    raw["adapters"][0].update(changes)
    (bundle / "molora.json").write_text(json.dumps(raw))


def test_open(tmp_path: Path) -> None:
    bundle = Bundle.open(make_bundle(tmp_path / "b"))
    assert bundle.adapters == ("math", "code")
    assert bundle.folder("code") == tmp_path / "b" / "adapters" / "code"
    assert bundle.router_spec is None
    bundle.verify()
    with pytest.raises(InputError, match="it has math, code"):
        bundle.folder("sql")


def test_no_torch_to_open(tmp_path: Path) -> None:
    make_bundle(tmp_path / "b")
    code = (
        "import sys; from molora_cli.core.bundle.store import Bundle;"
        f"b = Bundle.open({str(tmp_path / 'b')!r}); b.router_spec; b.digest;"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_missing_adapter_is_named_with_those_found(tmp_path: Path) -> None:
    folder = make_bundle(tmp_path / "b")
    (folder / "adapters" / "code").rename(folder / "adapters" / "Kode")
    with pytest.raises(InputError, match=r"lacks adapter code; found: Kode, math"):
        Bundle.open(folder)


@pytest.mark.parametrize(
    "place", ["../../x", "/etc", "adapters/../../x", "adapters/other", "adapters/math\0", "", "adapters"]
)
def test_a_folder_outside_is_refused(tmp_path: Path, place: str) -> None:
    folder = make_bundle(tmp_path / "b")
    edit_adapter(folder, folder=place)
    with pytest.raises(InputError, match="must be in adapters/math"):
        Bundle.open(folder)


@pytest.mark.parametrize("what", ["adapters/math", "adapters/math/adapter_model.safetensors", "adapters"])
def test_a_link_out_of_the_bundle_is_refused(tmp_path: Path, what: str) -> None:
    folder = make_bundle(tmp_path / "b")
    shutil.move(folder / what, tmp_path / "outside")
    (folder / what).symlink_to(tmp_path / "outside")
    with pytest.raises(InputError, match="leaves the bundle"):
        Bundle.open(folder)


@pytest.mark.parametrize("name", ["../x", "a/b", "base", "a b", ""])
def test_a_bad_name_in_the_manifest_is_refused(tmp_path: Path, name: str) -> None:
    folder = make_bundle(tmp_path / "b")
    edit_adapter(folder, name=name, folder=f"adapters/{name}")
    with pytest.raises(InputError):
        Bundle.open(folder)


def test_case_twins_in_the_manifest_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="twice"):
        Bundle.open(make_bundle(tmp_path / "b", ("math", "Math")))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot be read as JSON"),
        ("[]", "not a molora manifest"),
        ('{"format": "molora-bundle"}', "bundle format"),
        ('{"format": "molora-bundle", "format_version": "1.0"}', "base"),
        (
            '{"format": "molora-bundle", "format_version": "1.0", "base": {"id": "x"}, "adapters": []}',
            "no adapter",
        ),
        ("[" * 100_000, "cannot be read as JSON"),
    ],
)
def test_damaged_manifests(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "molora.json").write_text(text)
    with pytest.raises(InputError, match=message):
        Bundle.open(tmp_path)


def test_a_newer_major_version_says_who_reads_it(tmp_path: Path) -> None:
    folder = make_bundle(tmp_path / "b")
    edit(folder, format_version="2.0", created_by="molora 9.1")
    with pytest.raises(InputError, match=r"format 2\.0, this molora reads 1\.x") as caught:
        Bundle.open(folder)
    assert "molora 9.1" in caught.value.remedy


def test_not_a_bundle(tmp_path: Path) -> None:
    for path, message in ((tmp_path / "none", "does not exist"), (tmp_path, r"has no molora\.json")):
        with pytest.raises(InputError, match=message):
            Bundle.open(path)
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="is a file"):
        Bundle.open(tmp_path / "file")


def test_a_half_written_folder_is_refused(tmp_path: Path) -> None:
    folder = make_bundle(tmp_path / "b")
    (folder / MARKER).write_text("")
    with pytest.raises(InputError, match="incomplete"):
        Bundle.open(folder)


def test_a_changed_byte_is_named(tmp_path: Path) -> None:
    folder = make_bundle(tmp_path / "b")
    file = folder / "adapters" / "code" / "adapter_model.safetensors"
    file.write_bytes(b"kode")
    with pytest.raises(InputError, match=r"code/adapter_model\.safetensors was changed"):
        Bundle.open(folder).verify()


# -- the first bundle of format 1 loads for ever -----------------------------------
def test_the_bundle_of_format_one_opens() -> None:
    bundle = Bundle.open(FIXTURE / "bundle", base=str(FIXTURE / "tiny-base"))
    bundle.verify()
    assert bundle.manifest.format_version == "1.0"
    assert bundle.adapters == ("letters", "digits")
    assert bundle.base_path == FIXTURE / "tiny-base" and bundle.warnings == []
    assert bundle.router_spec is not None and bundle.router_spec.kind == "vocab"
    assert bundle.entry("digits").modules["model.layers.1.mlp.up_proj"].scale == pytest.approx(6 / 3**0.5)


def test_the_bundle_of_format_one_routes_and_computes_as_it_did() -> None:
    import torch
    from safetensors.torch import load_file

    from molora_cli import load

    expected = load_file(FIXTURE / "expected.safetensors")
    model = load(FIXTURE / "bundle", base=str(FIXTURE / "tiny-base"), device="cpu", dtype="float32")
    assert model.tokenizer("ab 12, c3!")["input_ids"] == expected["ids"][0].tolist()
    with torch.no_grad():
        out = model(expected["ids"])
    assert torch.as_tensor(out.trace.indices).reshape(-1).tolist() == expected["indices"].reshape(-1).tolist()
    assert set(expected["indices"].reshape(-1).tolist()) == {-1, 0, 1}
    torch.testing.assert_close(out.logits, expected["logits"], rtol=0, atol=1e-4)


def test_a_newer_minor_version_is_read_and_kept(tmp_path: Path) -> None:
    folder = tmp_path / "b"
    shutil.copytree(FIXTURE / "bundle", folder)
    edit(folder, format_version="1.7", new_idea=[{"a": 1}])
    edit_adapter(folder, new_part="x")
    bundle = Bundle.open(folder, base=str(FIXTURE / "tiny-base"))
    bundle.set_router(*a_router("digits"))
    raw = json.loads((folder / "molora.json").read_text())
    assert raw["format_version"] == "1.7" and raw["new_idea"] == [{"a": 1}]
    assert raw["adapters"][0]["new_part"] == "x"


# -- router -------------------------------------------------------------------
def a_router(expert: str = "math") -> tuple[RouterSpec, dict[str, np.ndarray]]:
    stage = StageSpec(kind="fixed", experts=[expert])
    return RouterSpec(stages=[stage]), {"stages.0.gates": np.ones(1, dtype=np.float32)}


def test_a_router_is_set_and_replaced(tmp_path: Path) -> None:
    folder = make_bundle(tmp_path / "b")
    edit(folder, future_field={"kept": [1, 2]})
    bundle = Bundle.open(folder)
    before = bundle.digest
    bundle.set_router(*a_router())
    again = Bundle.open(folder)
    assert again.router_spec is not None and again.router_spec.stages[0].experts == ["math"]
    assert again.digest == bundle.digest != before
    assert "fixed" in (folder / "README.md").read_text()
    again.set_router(*a_router("code"))
    assert Bundle.open(folder).router_spec.stages[0].experts == ["code"]  # type: ignore[union-attr]
    assert json.loads((folder / "molora.json").read_text())["future_field"] == {"kept": [1, 2]}
    assert not [p for p in folder.iterdir() if p.name.startswith(".")]


def test_a_torn_router_write_is_recognised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_bundle(tmp_path / "b")
    bundle = Bundle.open(folder)
    bundle.set_router(*a_router())

    def stopped(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("molora_cli.core.bundle.store.write_text", stopped)
    with pytest.raises(KeyboardInterrupt):
        bundle.set_router(*a_router("code"))
    with pytest.raises(InputError, match="write was stopped") as caught:
        _ = Bundle.open(folder).router_spec
    assert "attach-router" in caught.value.remedy


def test_a_router_with_a_stranger_is_refused(tmp_path: Path) -> None:
    folder = make_bundle(tmp_path / "b")
    Bundle.open(folder).set_router(*a_router("sql"))
    with pytest.raises(InputError, match="sql"):
        _ = Bundle.open(folder).router_spec


# -- default bundle -----------------------------------------------------------
def test_the_default_bundle(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no default"):
        default_bundle()
    folder = make_bundle(tmp_path / "b")
    set_default_bundle(folder)
    assert default_bundle() == folder.resolve()
    shutil.rmtree(folder)
    with pytest.raises(InputError, match="is gone"):
        default_bundle()


# -- card ---------------------------------------------------------------------
def test_the_card_escapes_what_strangers_wrote() -> None:
    entry = AdapterEntry(name="a", folder="adapters/a", source="x|<script>\x1b[31m\n# y", sha256="")
    manifest = Manifest(base=BaseEntry(id='b"\n: c'), adapters=[entry])
    card = render_card(manifest, "name")
    assert "\x1b" not in card and "<script>" not in card.replace("\\<script\\>", "")
    row = next(line for line in card.splitlines() if line.startswith("| a "))
    assert "# y" in row and row.replace("\\|", "").count("|") == 8
    assert card.splitlines()[1] == 'base_model: "b\\"\\\\x0a: c"'


# -- writing ------------------------------------------------------------------
def test_a_folder_appears_whole(tmp_path: Path) -> None:
    target = tmp_path / "a" / "b"
    with new_folder(target, force=False, own_file="f") as work:
        assert (work / MARKER).is_file() and work.parent == target.parent
        assert work.name.startswith(f".b.tmp-{os.getpid()}")
        (work / "f").write_text("1")
        assert not target.exists()
    assert [p.name for p in target.iterdir()] == ["f"]
    assert [p.name for p in target.parent.iterdir()] == ["b"]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError(), OSError(errno.ENOSPC, "full")])
def test_a_failure_leaves_the_earlier_folder(tmp_path: Path, error: BaseException) -> None:
    target = tmp_path / "b"
    with new_folder(target, force=False, own_file="f") as work:
        (work / "f").write_text("old")
    expected = MoloraError if isinstance(error, OSError) else type(error)
    with pytest.raises(expected), new_folder(target, force=True, own_file="f") as work:
        (work / "f").write_text("new")
        raise error
    assert (target / "f").read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["b"]


def test_a_full_disk_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(MoloraError, match="no space left") as caught, new_file(tmp_path / "x"):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert caught.value.exit_code == 1 and not isinstance(caught.value, InputError)
    with pytest.raises(MoloraError, match="no space left"), new_file(tmp_path / "x"):
        raise RuntimeError("I/O error: No space left on device (os error 28)")
    assert list(tmp_path.iterdir()) == []


def test_force_replaces_only_what_is_ours(tmp_path: Path) -> None:
    target = tmp_path / "b"
    target.mkdir()
    check_target(target, force=False, own_file="f")  # empty: fine
    (target / "holiday.jpg").write_text("")
    with pytest.raises(InputError, match="other things"):
        check_target(target, force=True, own_file="f")
    (target / "f").write_text("")
    check_target(target, force=True, own_file="f")
    with pytest.raises(InputError, match="--force") as caught:
        check_target(target, force=False, own_file="f")
    assert caught.value.exit_code == 2
    with pytest.raises(InputError, match="is a file"):
        check_target(target / "f", force=True, own_file="f")
    with pytest.raises(InputError, match="not a folder"):
        check_target(target / "f" / "g", force=True, own_file="f")


def test_two_writers(tmp_path: Path) -> None:
    target = tmp_path / "b"
    with pytest.raises(InputError, match="meanwhile"), new_folder(target, force=False, own_file="f") as slow:
        (slow / "f").write_text("slow")
        with new_folder(target, force=False, own_file="f") as fast:
            (fast / "f").write_text("fast")
    assert (target / "f").read_text() == "fast"
    assert [p.name for p in tmp_path.iterdir()] == ["b"]
    with new_folder(target, force=True, own_file="f") as slow:
        (slow / "f").write_text("slow")
        with new_folder(target, force=True, own_file="f") as fast:
            (fast / "f").write_text("faster")
    assert (target / "f").read_text() == "slow"


def test_what_a_killed_writer_left_is_cleared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "_alive", lambda pid: pid == 7)
    for name in (".b.tmp-5-x", ".b.tmp-7-x", ".b.c.tmp-5-x", ".b.old-5-y"):
        (tmp_path / name).mkdir()
    (tmp_path / ".b.old-5-y" / "f").write_text("old")
    with pytest.raises(InputError, match="--force"), new_folder(tmp_path / "b", force=False, own_file="f"):
        pass  # the bundle that was moved aside came back
    assert (tmp_path / "b" / "f").read_text() == "old"
    assert sorted(p.name for p in tmp_path.iterdir()) == [".b.c.tmp-5-x", ".b.tmp-7-x", "b"]


def test_a_killed_writer_leaves_nothing_that_opens(tmp_path: Path) -> None:
    code = (
        "import os, signal; from pathlib import Path; from molora_cli.core.bundle.writing import new_folder\n"
        f"with new_folder(Path({str(tmp_path / 'b')!r}), force=False, own_file='molora.json') as work:\n"
        "    (work / 'molora.json').write_text('{}')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == -9
    assert not (tmp_path / "b").exists()
    (left,) = tmp_path.iterdir()
    with pytest.raises(InputError, match="incomplete"):
        Bundle.open(left)
    with new_folder(tmp_path / "b", force=False, own_file="molora.json") as work:
        (work / "molora.json").write_text("{}")
    assert [p.name for p in tmp_path.iterdir()] == ["b"]


def test_files_may_be_read_by_others(tmp_path: Path) -> None:
    old = os.umask(0o022)
    try:
        with new_folder(tmp_path / "b", force=False, own_file="f") as work:
            (work / "f").write_text("")
            (work / "f").chmod(0o600)
    finally:
        os.umask(old)
    assert (tmp_path / "b").stat().st_mode & 0o777 == 0o755
    assert (tmp_path / "b" / "f").stat().st_mode & 0o777 == 0o644
