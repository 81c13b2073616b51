"""The `vocab` router: a token's id alone decides. Exact, no training, no base.

Rules become one table from token id to expert when the router is attached; a bundle holds that table and
never runs a stored pattern. Rules are ranges, lists, tokens by text, patterns on token texts, and classes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from molora_cli.core.pieces import token_pieces
from molora_cli.core.router.kinds import IdStage, Scores, State, Surroundings, register_kind, stage_tensor
from molora_cli.core.router.modality import MODALITIES, TEXT, modality_ids
from molora_cli.core.router.pattern import matching
from molora_cli.core.router.spec import StageSpec
from molora_cli.errors import InputError
from molora_cli.text import printable, shorten

NOBODY = -1
_RULES = (
    "ids:1,2,5-9  range:1000-1999  token:TEXT  regex:PATTERN  "
    "class:special|digit|space|text|image|video|audio"
)
_CLASSES: dict[str, Callable[[str], bool]] = {
    "digit": lambda text: text.strip().isdigit(),
    "space": lambda text: text != "" and text.isspace(),
}


@dataclass(frozen=True)
class Rule:
    """Tokens that belong to an expert: `form` is ids, range, token, regex or class."""

    expert: str
    form: str
    value: str

    def __str__(self) -> str:
        return f"{self.expert}={self.form}:{self.value}"


@dataclass(frozen=True)
class Vocabulary:
    """What rules are read against: texts[i] is token i's text, special the ids of special tokens, modalities
    the ids of images and the like by name."""

    texts: tuple[str, ...]
    special: frozenset[int]
    modalities: Mapping[str, frozenset[int]] = field(default_factory=dict)

    @classmethod
    def of(cls, tokenizer: Any, size: int, config: Mapping[str, Any] | None = None) -> Vocabulary:
        """The vocabulary of a transformers tokenizer. Ids up to `size` (rows of the embedding) that it does
        not use have an empty text. config: the base's config.json, for the classes of multimodal models."""
        pieces = token_pieces(tokenizer.backend_tokenizer, range(size))
        special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        texts = tuple(pieces.get(i, "") for i in range(size))
        added = {token.content: i for i, token in tokenizer.added_tokens_decoder.items()}
        modalities = modality_ids(config or {}, added)
        return cls(texts, frozenset(special | set(tokenizer.all_special_ids)), modalities)

    def of_class(self, name: str) -> list[int]:
        """The ids of a class of tokens. Raises InputError for one that is not known, or not in this model."""
        if name == "special":
            return [i for i in self.special if i < len(self.texts)]
        if name in _CLASSES:
            return [i for i, text in enumerate(self.texts) if _CLASSES[name](text)]
        if name == TEXT:
            other = frozenset().union(*self.modalities.values())
            return [i for i in range(len(self.texts)) if i not in other]
        if name in self.modalities:
            return [i for i in self.modalities[name] if i < len(self.texts)]
        if name in MODALITIES:
            raise InputError(
                f"this base's config and tokenizer name no {name} tokens",
                "name them yourself: ids:..., range:... or regex:...",
            )
        raise InputError(
            f"no class of tokens is called '{shorten(name, 40)}'",
            f"use special, {', '.join(_CLASSES)}, {TEXT}, {', '.join(MODALITIES)}, or a regex",
        )


def parse_rule(text: str) -> Rule:
    """`NAME=FORM:VALUE`. Raises InputError."""
    expert, sep, rest = text.partition("=")
    form, colon, value = rest.partition(":")
    if not (expert and sep and colon and value) or form not in ("ids", "range", "token", "regex", "class"):
        raise InputError(f"'{shorten(text)}' is not a rule", f"write NAME=RULE with RULE one of: {_RULES}")
    return Rule(expert, form, value)


def rule_ids(rule: Rule, vocabulary: Vocabulary) -> list[int]:
    """The token ids of a rule, ascending. Raises InputError: malformed, outside the vocabulary, or none."""
    size = len(vocabulary.texts)
    if rule.form in ("ids", "range"):
        found = [i for part in rule.value.split(",") for i in _range(rule, part.strip(), size)]
    elif rule.form == "token":
        found = [i for i, text in enumerate(vocabulary.texts) if text == rule.value]
    elif rule.form == "regex":
        # ids without a text are no token; a pattern like ^$ must not take them
        used = [i for i, text in enumerate(vocabulary.texts) if text]
        found = [used[n] for n in matching(rule.value, [vocabulary.texts[i] for i in used])]
    else:
        found = vocabulary.of_class(rule.value)
    if not found:
        raise InputError(
            f"rule '{shorten(str(rule))}' matches no token of the vocabulary ({size} tokens)",
            "check the text: tokens often start with a space; ^ and $ anchor a pattern to the whole token",
        )
    return sorted(set(found))


def build_vocab(
    rules: Sequence[Rule], vocabulary: Vocabulary, rest: str | None
) -> tuple[StageSpec, dict[str, Tensor]]:
    """The stage and its tensors. rest: the expert of all other tokens; None leaves them to the stages after.

    Raises InputError for rules that overlap between experts, listing the tokens.
    """
    if not rules:
        raise InputError("a vocab router needs rules", f"--rule NAME=RULE with RULE one of: {_RULES}")
    experts = list(dict.fromkeys(rule.expert for rule in rules))
    if rest is not None and rest not in experts:
        experts.append(rest)
    table = torch.full((len(vocabulary.texts),), NOBODY, dtype=torch.int32)
    owner: dict[int, Rule] = {}
    clashes: dict[int, tuple[Rule, Rule]] = {}
    described = []
    for rule in rules:
        ids = rule_ids(rule, vocabulary)
        described.append({"expert": rule.expert, "rule": f"{rule.form}:{rule.value}", "tokens": len(ids)})
        for i in ids:
            before = owner.setdefault(i, rule)
            if before.expert != rule.expert:
                clashes.setdefault(i, (before, rule))
        table[ids] = experts.index(rule.expert)
    if clashes:
        first, second = next(iter(clashes.values()))
        raise InputError(
            f"rules '{shorten(str(first), 60)}' and '{shorten(str(second), 60)}' claim the same tokens: "
            f"{list_tokens(sorted(clashes), vocabulary)}",
            "make each token belong to one adapter",
        )
    if rest is not None:
        table[table == NOBODY] = experts.index(rest)
    params = {"rules": described, "rest": rest}
    return StageSpec(kind="vocab", experts=experts, params=params), {"table": table}


def missed_tokens(table: Tensor) -> list[int]:
    """Ids that no rule covers."""
    return (table == NOBODY).nonzero().flatten().tolist()


def list_tokens(ids: Sequence[int], vocabulary: Vocabulary, most: int = 12) -> str:
    """A few tokens for a message: 5 'the', 9 ' of' and 3 more."""
    shown = [f"{i} '{shorten(printable(vocabulary.texts[i]), 24)}'" for i in ids[:most]]
    more = f" and {len(ids) - most} more" if len(ids) > most else ""
    return ", ".join(shown) + more


@register_kind
class VocabStage(IdStage):
    """tensors: table (V,) int32, token id -> index into experts, -1 = left to the next stage."""

    kind = "vocab"

    def __init__(self, spec: StageSpec, tensors: Mapping[str, Tensor], around: Surroundings) -> None:
        super().__init__(spec, tensors, around)
        table = stage_tensor(tensors, "table", (None,), self.kind).to(torch.int64)
        if len(table) == 0 or int(table.min()) < NOBODY or int(table.max()) >= len(spec.experts):
            raise InputError(
                "the table of the vocab router points to experts that it does not name",
                "attach the router again: molora attach-router BUNDLE --kind vocab ...",
            )
        # one more row, so that an id beyond the table (a vocabulary that has grown) is left to the next stage
        self.table = torch.cat([table, table.new_tensor([NOBODY])])  # (V + 1,)

    @property
    def abstains(self) -> bool:
        return True

    def score(self, ids: Tensor, mask: Tensor, state: State) -> tuple[Scores, State]:
        beyond = (ids < 0) | (ids >= len(self.table) - 1)
        expert = self.table[torch.where(beyond, len(self.table) - 1, ids)]  # (B, T)
        decided = expert != NOBODY
        logp = torch.full((*ids.shape, len(self.experts)), -torch.inf, dtype=torch.float64, device=ids.device)
        logp = logp.scatter(-1, expert.clamp(min=0).unsqueeze(-1), 0.0).unsqueeze(2)  # (B, T, 1, E)
        return Scores(logp.expand(-1, -1, self.groups, -1), decided), state


def _range(rule: Rule, part: str, size: int) -> range:
    match = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", part)
    if match is None or (rule.form == "range" and match[2] is None):
        raise InputError(
            f"rule '{shorten(str(rule))}': '{shorten(part, 20)}' is no id or range", f"write {_RULES}"
        )
    first = int(match[1])
    last = int(match[2] or match[1])
    if last < first or last >= size:
        why = "ends before it starts" if last < first else f"is outside the vocabulary (0 to {size - 1})"
        raise InputError(f"rule '{shorten(str(rule))}': {shorten(part, 20)} {why}", "correct the range")
    return range(first, last + 1)
