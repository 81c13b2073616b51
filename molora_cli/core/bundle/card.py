"""The model card of a bundle: what it holds, where that comes from, how to run it."""

from __future__ import annotations

from pathlib import Path

from molora_cli.core.bundle.manifest import AdapterEntry, Manifest
from molora_cli.core.bundle.writing import write_text
from molora_cli.text import printable

CARD_FILE = "README.md"


def _cell(value: object) -> str:
    """A value as one cell of a Markdown table: no line break, no cell border, no markup from a stranger's
    file."""
    text = printable(str(value if value not in (None, "") else "unknown"))
    for char in "\\|<>`[]":
        text = text.replace(char, f"\\{char}")
    return text


def _rank(entry: AdapterEntry) -> str:
    ranks = sorted({module.rank for module in entry.modules.values()})
    return str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]} to {ranks[-1]}" if ranks else "unknown"


def render_card(manifest: Manifest, name: str) -> str:
    """The card as Markdown with the YAML head that model hubs read."""
    base = manifest.base
    head = ["---", f"base_model: {_yaml(base.id)}", "library_name: molora", "tags: [lora, molora]", "---"]
    revision = f" at revision {_cell(base.revision)}" if base.revision else ""
    body = [
        f"# {_cell(name)}",
        "",
        f"A molora bundle: {len(manifest.adapters)} LoRA adapters of one base model, of which every token "
        "takes the one it needs.",
        "",
        f"**Base:** {_cell(base.id)}{revision}. Not included; its fingerprint is checked at load.",
        "",
        "| adapter | source | revision | licence | rank | modules | parameters |",
        "|---|---|---|---|---|---|---|",
    ]
    body += [
        f"| {_cell(e.name)} | {_cell(e.source)} | {_cell(e.revision or '-')} | {_cell(e.licence)} | "
        f"{_rank(e)} | {len(e.modules)} | {e.parameters:,} |"
        for e in manifest.adapters
    ]
    routed = manifest.routing
    body += [
        "",
        f"**Router:** {_cell(routed.kind)}."
        if routed
        else "**Router:** none yet (`molora train-router` makes one).",
        "",
        "Each adapter's licence holds for its part, and the base's for the base. Where a licence is unknown, "
        "ask the source before passing the bundle on.",
        "",
        "## Run it",
        "",
        "```",
        "molora inspect .",
        "molora chat .",
        "```",
        "",
        "Every folder below `adapters/` is a plain PEFT adapter and opens on its own:",
        "",
        "```python",
        "from peft import PeftModel",
        f'model = PeftModel.from_pretrained(base_model, "adapters/{manifest.adapters[0].name}")',
        "```",
        "",
    ]
    return "\n".join([*head, "", *body])


def _yaml(text: str) -> str:
    quoted = printable(text).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{quoted}"'


def write_card(folder: Path, manifest: Manifest, name: str | None = None) -> None:
    """Write README.md of the bundle in `folder`; `name` is the title, the folder's own name by default."""
    write_text(folder / CARD_FILE, render_card(manifest, name or folder.absolute().name))
