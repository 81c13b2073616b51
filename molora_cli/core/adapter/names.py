"""Tensor names of adapters: what each is, and which module of the base it belongs to.

Trainers leave marks in names: `base_model.model.` (PEFT), `module.` (DDP), `_orig_mod.` (torch.compile),
`.default.` (an adapter's name), `language_model.` (a multimodal wrapper), or no backbone prefix at all.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from molora_cli.errors import InputError
from molora_cli.text import shorten

# an embedding's LoRA stores A (r, V) and B (d, r) under names of its own
_LORA = re.compile(
    r"(?P<module>.*)\.(?P<part>lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector)"
    r"(?P<tail>(?:\.[^.]+)*)\Z",
    re.DOTALL,
)
# whole segments that wrappers insert and that name nothing
_NOISE = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module"})
_PEFT = ("base_model.model.", "base_model.lora_model.model.")
# containers around a decoder; two paths that differ only in these name the same module
_CONTAINERS = frozenset(
    {"model", "language_model", "text_model", "transformer", "decoder", "gpt_neox", "backbone", "llm"}
)
_LORA_ONLY = "give a LoRA adapter made by PEFT"
# what a name gives away: pattern, method or trainer, way out
_FOREIGN = (
    (re.compile(r"\.(ia3_l)"), "IA3", _LORA_ONLY),
    (re.compile(r"\.(hada_w|lokr_w)"), "LoHa or LoKr", _LORA_ONLY),
    (
        re.compile(r"\.(vera_lambda|vblora_|boft_|oft_|fourierft_|hra_u|bone_|miss_)"),
        "another PEFT method",
        _LORA_ONLY,
    ),
    (re.compile(r"\.lora_(E|ranknum)(\.|\Z)"), "AdaLoRA", _LORA_ONLY),
    (
        re.compile(r"\.(lora_a|lora_b)\.weight\Z"),
        "torchtune (lora_a.weight, lora_b.weight)",
        "export it with torchtune as a PEFT adapter, which also reorders its q and k rows",
    ),
    (
        re.compile(r"\.(lora_a|lora_b)\Z"),
        "MLX-LM (lora_a, lora_b)",
        "name it adapters.safetensors, beside MLX's own adapter_config.json",
    ),
    (
        re.compile(r"(lora_unet_|lora_te\w*_|\.lora_down\.|\.lora_up\.)"),
        "kohya (lora_down, lora_up)",
        "convert it to PEFT with the tool that made it; most such files belong to image models",
    ),
)


@dataclass(frozen=True)
class Named:
    """One tensor's name taken apart.

    module: path without wrappers' marks; role: "A", "B", "bias", "magnitude"; adapter: the adapter's name
    inside the key, "" where there is none; embedding: stored as lora_embedding_*.
    """

    key: str
    module: str
    role: str
    adapter: str
    embedding: bool


def strip_wrappers(path: str) -> str:
    """A module path without the marks of PEFT, DDP, FSDP and torch.compile."""
    segments = [s for s in path.split(".") if s not in _NOISE]
    path = ".".join(segments)
    changed = True
    while changed:
        changed = False
        for prefix in (*_PEFT, "module."):
            if path.startswith(prefix):
                path, changed = path[len(prefix) :], True
    return path


def parse_key(key: str) -> Named | None:
    """A LoRA tensor's name taken apart, or None where the name is no LoRA tensor's."""
    match = _LORA.match(key)
    if match is None:
        return None
    part, tail = match["part"], match["tail"].split(".")[1:]
    leaf = tail.pop() if tail and tail[-1] in ("weight", "bias") else "weight"
    if len(tail) > 1:
        return None
    role = {"lora_A": "A", "lora_embedding_A": "A", "lora_magnitude_vector": "magnitude"}.get(part, "B")
    if leaf == "bias":
        if role != "B":
            return None
        role = "bias"
    module = strip_wrappers(match["module"])
    return Named(key, module, role, tail[0] if tail else "", part.startswith("lora_embedding"))


def canonical_key(module: str, role: str, embedding: bool) -> str:
    """The name under which PEFT saves a tensor of `module` (role "A", "B", "bias" or "magnitude")."""
    prefix = f"base_model.model.{module}."
    if role == "magnitude":
        return prefix + "lora_magnitude_vector"
    if role == "bias":
        return prefix + "lora_B.bias"
    return prefix + (f"lora_embedding_{role}" if embedding else f"lora_{role}.weight")


def foreign(key: str) -> tuple[str, str] | None:
    """Which other method or trainer a tensor's name belongs to, and the way out; or None."""
    return next(((what, remedy) for pattern, what, remedy in _FOREIGN if pattern.search(key)), None)


def core_path(module: str) -> str:
    """A module path without leading containers ("model.language_model.layers.0.x" -> "layers.0.x")."""
    segments = module.split(".")
    while len(segments) > 1 and segments[0] in _CONTAINERS:
        segments.pop(0)
    return ".".join(segments)


class ModuleIndex:
    """Looks a file's module paths up among the base's: as they stand, else without containers if unique."""

    def __init__(self, modules: Iterable[str]) -> None:
        self._known = frozenset(modules)
        self._by_core: dict[str, str | None] = {}
        for module in self._known:
            core = core_path(module)
            self._by_core[core] = None if core in self._by_core else module

    def find(self, path: str) -> str | None:
        """The base's module for a file's path, or None."""
        return path if path in self._known else self._by_core.get(core_path(path))


def group(names: Iterable[Named], where: str) -> dict[str, dict[str, Named]]:
    """Tensors by module and role. Raises InputError for two tensors in one place or several adapters."""
    listed = list(names)
    adapters = sorted({n.adapter for n in listed} - {""})
    if len(adapters) > 1:
        raise InputError(
            f"{where} holds the tensors of several adapters: {', '.join(shorten(a, 40) for a in adapters)}",
            "save each adapter to a folder of its own",
        )
    modules: dict[str, dict[str, Named]] = {}
    for named in listed:
        roles = modules.setdefault(named.module, {})
        if named.role in roles:
            first = shorten(roles[named.role].key, 120)
            raise InputError(
                f"{where}: '{first}' and '{shorten(named.key, 120)}' name the same tensor",
                "save the adapter again, without wrappers",
            )
        roles[named.role] = named
    return modules
