"""What every reader of a format hands over: tensors in PEFT's orientation, by the file's own names."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from molora_cli.core.adapter.config import LoraSettings
from molora_cli.core.adapter.names import Named
from molora_cli.core.adapter.tensors import TensorFile
from molora_cli.errors import InputError

MAX_OFFENDERS = 12  # tensors at fault that one error names


@dataclass(frozen=True)
class Source:
    """One adapter's tensors, sorted, before they meet the base.

    format: "peft", "mlx" or "gguf". file: A (r, in) and B (out, r) whatever the orientation on disk.
    named: the LoRA tensors in it. settings: rank and alpha by module. notes: for the user.
    """

    format: str
    file: TensorFile
    named: Sequence[Named]
    settings: LoraSettings
    config: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass
class Offenders:
    """Collects what is wrong with the tensors of one file, so that one error names all of it."""

    where: str
    lines: list[str] = field(default_factory=list)

    def add(self, line: str) -> None:
        self.lines.append(line)

    def refuse(self, of: int, remedy: str) -> None:
        """Raises InputError with everything collected; does nothing where nothing was."""
        if not self.lines:
            return
        shown = "; ".join(self.lines[:MAX_OFFENDERS])
        more = f"; and {len(self.lines) - MAX_OFFENDERS} more" if len(self.lines) > MAX_OFFENDERS else ""
        count = f"{len(self.lines)} faults in {of} tensors: " if len(self.lines) > 1 else ""
        raise InputError(f"{self.where}: {count}{shown}{more}", remedy)


def natural(name: str) -> list[tuple[int, str]]:
    """A sort key under which layer 2 comes before layer 10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d{1,9})", name)]
