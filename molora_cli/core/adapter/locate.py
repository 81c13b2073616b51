"""From the name of an adapter to its files: a folder, a file, or a hub repository. Never a guess."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from molora_cli.core.adapter.files import listing, shown
from molora_cli.core.adapter.mlx_config import WEIGHTS as MLX_WEIGHTS
from molora_cli.errors import InputError
from molora_cli.refs import Ref, offline
from molora_cli.text import shorten

CONFIG = "adapter_config.json"
WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")  # the first one wins, as in PEFT
_HUB_FILES = (CONFIG, WEIGHTS[0], "README.md", *MLX_WEIGHTS, "xlora_config.json")
_TORCHTUNE = ("adapter_model.pt", "adapter_0.pt")


@dataclass(frozen=True)
class Located:
    """folder: where the adapter lies; weights: its tensors; config: adapter_config.json, None for GGUF;
    format: "peft", "mlx" or "gguf"; revision: the hub's commit."""

    folder: Path
    config: Path | None
    weights: Path
    revision: str | None = None
    format: str = "peft"


def locate(ref: Ref) -> Located:
    """The files of an adapter. Raises InputError, by name for formats that are recognised and not read."""
    if ref.kind == "hub":
        folder, revision = _download(ref)
        return _in_folder(folder, str(ref), revision)
    if ref.path is None:
        raise InputError(f"'{ref}' is a built-in base, not an adapter", "give a folder or a hub id")
    path = ref.path
    if _is_folder(path):
        return _in_folder(path, shown(path), None)
    if path.suffix == ".gguf":
        return Located(path.parent, None, path, None, "gguf")
    if path.name.endswith(MLX_WEIGHTS):
        return _mlx(path.parent, path, shown(path), None)
    return _in_folder(_folder_around(path), shown(path), None)


def _is_folder(path: Path) -> bool:
    """Raises InputError for what is neither a folder nor an ordinary file."""
    try:
        mode_known = path.stat()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise InputError(f"{shown(path)} cannot be opened: {reason}", "check the path") from error
    if path.is_dir():
        return True
    if not path.is_file():
        raise InputError(
            f"{shown(path)} is neither a folder nor a file (mode {mode_known.st_mode:o})", "check the path"
        )
    return False


def _folder_around(path: Path) -> Path:
    """The folder of one of the files of an adapter."""
    if path.name in _TORCHTUNE:
        raise _torchtune(shown(path))
    if path.name not in (CONFIG, *WEIGHTS):
        raise InputError(
            f"{shown(path)} is not one of an adapter's files "
            f"({CONFIG}, {', '.join((*WEIGHTS, *MLX_WEIGHTS))}, *.gguf)",
            "give the adapter's folder",
        )
    used = next((w for w in WEIGHTS if (path.parent / w).exists()), None)
    if path.name in WEIGHTS and path.name != used:
        raise InputError(
            f"{shown(path)} would not be used: {used} lies beside it and wins, as in PEFT",
            f"remove one of the two, or give the folder {shown(path.parent)}",
        )
    return path.parent


def _in_folder(folder: Path, name: str, revision: str | None) -> Located:
    weights = next((folder / w for w in WEIGHTS if os.path.lexists(folder / w)), None)
    if os.path.lexists(folder / "xlora_config.json"):
        raise InputError(
            f"{name} is an X-LoRA model (xlora_config.json), a router over several adapters",
            "compose its adapters themselves, then train a router: molora train-router",
        )
    if weights is None:
        mlx = next((folder / n for n in MLX_WEIGHTS if os.path.lexists(folder / n)), None)
        if mlx is not None:
            return _mlx(folder, mlx, name, revision)
        if not os.path.lexists(folder / CONFIG) and (gguf := _only_gguf(folder, name)) is not None:
            return Located(folder, None, gguf, revision, "gguf")
        _refuse_by_content(folder, name)
    config = folder / CONFIG
    if not os.path.lexists(config):
        raise InputError(
            f"{name} is no adapter: {CONFIG} is missing (there: {listing(folder)})",
            _nested(folder, "give the adapter's folder"),
        )
    if weights is None:
        raise InputError(
            f"{name} has no weights: {' or '.join(WEIGHTS)} is missing (there: {listing(folder)})",
            _nested(folder, "download the adapter again, or save it with save_pretrained"),
        )
    return Located(folder, config, weights, revision)


def _mlx(folder: Path, weights: Path, name: str, revision: str | None) -> Located:
    if not os.path.lexists(folder / CONFIG):
        raise InputError(
            f"{name} is an MLX adapter without {CONFIG}: its scale is unknown (there: {listing(folder)})",
            'add {"fine_tune_type": "lora", "num_layers": N, "lora_parameters": {"rank": R, "scale": S}} '
            f"as {CONFIG}",
        )
    return Located(folder, folder / CONFIG, weights, revision, "mlx")


def _only_gguf(folder: Path, name: str) -> Path | None:
    found = sorted(folder.glob("*.gguf"))
    if len(found) > 1:
        some = ", ".join(shorten(p.name, 60) for p in found[:4])
        raise InputError(f"{name} holds {len(found)} GGUF files ({some})", "give one of them by its path")
    return found[0] if found else None


def _torchtune(name: str) -> InputError:
    return InputError(
        f"{name} is a checkpoint of torchtune, which does not say rank and alpha",
        "export it with torchtune as a PEFT adapter (adapter_config.json and adapter_model.safetensors)",
    )


def _refuse_by_content(folder: Path, name: str) -> None:
    if not os.path.lexists(folder / CONFIG) and any((folder / n).is_file() for n in _TORCHTUNE):
        raise _torchtune(name)
    if (folder / "config.json").is_file() and any(folder.glob("*.safetensors")):
        raise InputError(
            f"{name} is a whole model, not an adapter", "give it as --base, or give an adapter's folder"
        )
    if os.path.lexists(folder / "molora.json"):
        raise InputError(
            f"{name} is a molora bundle, not an adapter", "give one of its adapters: BUNDLE/adapters/NAME"
        )


def _nested(folder: Path, otherwise: str) -> str:
    """A remedy that points at adapters one level down (checkpoints, or PEFT's folder per adapter name)."""
    found = [p.parent for p in sorted(folder.glob(f"*/{CONFIG}"))[:3]]
    return f"adapters lie below: {', '.join(shown(p) for p in found)}" if found else otherwise


def _download(ref: Ref) -> tuple[Path, str | None]:
    """The snapshot of a hub repository: only an adapter's own files, from the cache where offline."""
    from huggingface_hub import errors as hub
    from huggingface_hub import snapshot_download

    repo = ref.repo or ""

    def fetch(names: tuple[str, ...]) -> Path:
        found = snapshot_download(
            repo,
            revision=ref.revision,
            allow_patterns=list(names),
            local_files_only=offline(),
            etag_timeout=5,
        )
        return Path(found)

    try:
        folder = fetch(_HUB_FILES)
        if not (folder / WEIGHTS[0]).exists():
            folder = fetch((CONFIG, WEIGHTS[1]))
    except hub.GatedRepoError as error:
        raise InputError(
            f"{ref} is gated: its licence must be accepted first", "accept it on the hub, then: hf auth login"
        ) from error
    except hub.RevisionNotFoundError as error:
        raise InputError(f"{repo} has no revision '{ref.revision}'", "check the part after @") from error
    except hub.RepositoryNotFoundError as error:
        raise InputError(
            f"{ref} was not found on the hub (or is private)",
            "check the name; hf auth login for a private one",
        ) from error
    except hub.LocalEntryNotFoundError as error:
        why = "no network may be used (offline mode)" if offline() else "the hub cannot be reached"
        raise InputError(
            f"{ref} is not in the local cache and {why}",
            "download it on a machine with network (hf download), or give a local folder: ./name",
        ) from error
    except (hub.HfHubHTTPError, hub.HFValidationError, OSError) as error:
        raise InputError(
            f"{ref} could not be fetched from the hub: {shorten(str(error), 160)}",
            "try again, or give a local folder",
        ) from error
    return folder, folder.name if folder.parent.name == "snapshots" else ref.revision
