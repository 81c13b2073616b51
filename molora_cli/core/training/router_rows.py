"""Rows of several domains to labelled token rows: limits, held-out split by document, mixes, digests."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from molora_cli.core.router.features import DECAYS
from molora_cli.core.training.data import Example
from molora_cli.core.training.encode import Encoded, encode_all, segment_labels
from molora_cli.core.training.mixing import Mixer, labelled
from molora_cli.core.training.overlap import pack
from molora_cli.errors import InputError
from molora_cli.out import Ticker, no_ticks

NO_LABEL = -1
MIXED = "mixed"
# a token is three to five characters in most text; mixes are drawn by characters, before they are tokenised
_CHARACTERS_PER_TOKEN = 3


@dataclass(frozen=True)
class AheadSettings:
    """How the network that looks ahead is trained (`training.ahead`). lead_share: of a batch of `batch`
    tokens lead to a part. lr falls linearly to 0."""

    units: int = 64
    steps: int = 600
    batch: int = 2048
    lead_share: float = 0.3
    lr: float = 3e-3
    weight_decay: float = 0.01
    smoothing: float = 0.02
    dropout: float = 0.1


@dataclass(frozen=True)
class RouterSettings:
    """How a context router is trained.

    rows: per domain at most; mixes: rows that change domain, mix_share of a batch; val_share: of a domain's
    documents is held out, val_rows at most; every: steps between evaluations; patience: evaluations without
    progress before it stops. margin: see `router.hysteresis`. ahead: how the network that looks ahead is
    trained, None: there is none.
    """

    steps: int = 500
    seed: int = 0
    batch: int = 12
    lr: float = 2e-3
    weight_decay: float = 0.02
    smoothing: float = 0.02
    dropout: float = 0.1
    max_length: int = 512
    rows: int = 1000
    mixes: int = 1600
    mix_share: float = 0.45
    val_share: float = 0.1
    val_rows: int = 40
    every: int = 50
    patience: int = 5
    projection: int = 96
    hidden: int = 128
    decays: tuple[float, ...] = DECAYS
    top_k: int = 1
    margin: float = 0.0
    ahead: AheadSettings | None = AheadSettings()

    def digest(self) -> str:
        return hashlib.sha256(repr(sorted(asdict(self).items())).encode()).hexdigest()


@dataclass(frozen=True)
class TokenRow:
    """One row as tokens: ids, label (index into the experts, NO_LABEL = masked from the loss), completion.

    ahead: labels by which the tokens that lead to a part of an answer take that part's (None: as `labels`);
    lead: which tokens those are.
    """

    ids: Tensor  # (T,) int64
    labels: Tensor  # (T,) int64
    completion: Tensor  # (T,) bool
    ahead: Tensor | None = None  # (T,) int64
    lead: Tensor | None = None  # (T,) bool

    @property
    def led(self) -> Tensor:
        """`ahead` where it is known, else `labels`."""
        return self.labels if self.ahead is None else self.ahead


@dataclass
class RouterRows:
    """What training reads. train and held_out: expert -> rows of that domain alone, and MIXED -> mixes."""

    experts: tuple[str, ...]
    train: dict[str, list[TokenRow]]
    held_out: dict[str, list[TokenRow]]
    documents: dict[str, int]
    digests: dict[str, str]
    notes: list[str] = field(default_factory=list)
    seen: dict[str, str] = field(default_factory=dict)  # see overlap.pack: the documents, for an evaluation
    cuts: tuple[int, ...] = ()  # ids of special tokens, see router.spans

    @property
    def digest(self) -> str:
        """One digest of all rows, their order and their labels."""
        found = hashlib.sha256()
        for part in (self.train, self.held_out):
            for name, rows in part.items():
                found.update(f"{name}:{len(rows)};".encode())
                for row in rows:
                    found.update(row.ids.numpy().tobytes() + row.labels.numpy().tobytes())
        return found.hexdigest()


def document_key(row: Example) -> str:
    """What makes two rows one document: the `document` field, else the same text."""
    if row.document is not None:
        return f"document {row.document}"
    return "text " + "\0".join(row.contents)


def _rank(seed: int, key: str) -> str:
    return hashlib.sha256(f"{seed} {key}".encode("utf-8", "surrogatepass")).hexdigest()


def split_documents(rows: Sequence[Example], share: float, seed: int) -> tuple[list[Example], list[Example]]:
    """(train, held out): all rows of a document stay on one side; at least one document on each side where
    there are two. The split depends on the documents and the seed, not on their order in the file."""
    keys = sorted({document_key(r) for r in rows}, key=lambda k: _rank(seed, k))
    count = min(len(keys) - 1, max(1, round(share * len(keys)))) if share > 0 and len(keys) > 1 else 0
    held = set(keys[:count])
    train = [r for r in rows if document_key(r) not in held]
    return train, [r for r in rows if document_key(r) in held]


def rows_digest(rows: Sequence[Example]) -> str:
    """Digest of the rows' text, for the router's header."""
    found = hashlib.sha256()
    for row in rows:
        found.update("\0".join(row.contents).encode() + b"\n")
    return found.hexdigest()


def token_row(encoded: Encoded, example: Example, experts: Sequence[str]) -> TokenRow:
    """Labels by the segment that holds the token.

    Role markers and ends of turn take the label before them: an answer starts under its question's adapter.
    The template before the first message and words that join segments are masked.
    """
    index = {name: i for i, name in enumerate(experts)}
    found = segment_labels(encoded, example.segments)
    labels: list[int] = []
    last = NO_LABEL
    for name, message in zip(found, encoded.message, strict=True):
        label = NO_LABEL if name is None else index[name]
        last = label if label != NO_LABEL else last
        labels.append(last if message < 0 else label)
    ahead, lead = _ahead(labels, encoded)
    whole, truth = np.int64, np.bool_
    columns = [
        (encoded.ids, whole),
        (labels, whole),
        (encoded.completion, truth),
        (ahead, whole),
        (lead, truth),
    ]
    # by way of numpy, because torch takes three times as long to read a list
    return TokenRow(*(torch.from_numpy(np.array(values, dtype=kind)) for values, kind in columns))


def _ahead(labels: Sequence[int], encoded: Encoded) -> tuple[list[int], list[bool]]:
    """Labels by which a token that leads to a part of an answer takes that part's, and which tokens do.

    They are the template's tokens before an answer (where an answer has several parts, its first need not be
    of the last question's domain), the words that join two parts, and where nothing joins them the last token
    of the part before. Each predicts what comes, and a wrong adapter there costs most of what is lost on
    answers in several parts.
    """
    completion, message = encoded.completion, encoded.message
    found, lead = list(labels), [False] * len(labels)
    following = NO_LABEL
    for i in reversed(range(len(labels))):
        if completion[i]:
            if labels[i] == NO_LABEL:
                found[i], lead[i] = following, following != NO_LABEL
            else:
                if following not in (NO_LABEL, labels[i]) and completion[i + 1] and labels[i + 1] != NO_LABEL:
                    found[i], lead[i] = following, True
                following = labels[i]
        elif message[i] < 0 and following != NO_LABEL:
            found[i], lead[i] = following, True
        else:
            following = NO_LABEL  # a user's words: nothing before them leads to an answer
    return found, lead


def _mixes(
    rows: Mapping[str, Sequence[Example]], count: int, settings: RouterSettings, seed: int
) -> list[Example]:
    usable = {name: found for name, found in rows.items() if found}
    if len(usable) < 2 or count <= 0:
        return []
    mixer = Mixer(usable, limit=settings.max_length * _CHARACTERS_PER_TOKEN, seed=seed)
    return [mixer.draw() for _ in range(count)]


def prepare(
    domains: Mapping[str, Sequence[Example]],
    tokenizer: Any,
    settings: RouterSettings,
    *,
    least: int = 2,
    changing: Sequence[Example] = (),
    ticker: Ticker = no_ticks,
) -> RouterRows:
    """Rows per expert (`least` or more) to what training reads. changing: rows of several domains, with
    segments. Raises InputError for a domain without tokens."""
    experts = tuple(domains)
    if len(experts) < least:
        raise InputError(
            f"a router needs rows of two domains or more, and only '{experts[0]}' has any"
            if experts
            else "no training rows were given",
            "give --data NAME=FILE once for each adapter",
        )
    train: dict[str, list[Example]] = {}
    held: dict[str, list[Example]] = {}
    notes = []
    for name, rows in domains.items():
        chosen = sorted(rows, key=lambda r: _rank(settings.seed, document_key(r)))[: settings.rows]
        if len(chosen) < len(rows):
            notes.append(f"{name}: {len(chosen)} of {len(rows)} rows are used")
        ours = [labelled(r, name) for r in chosen]
        train[name], held[name] = split_documents(ours, settings.val_share, settings.seed + 1)
        held[name] = held[name][: settings.val_rows]
    mixes = [*changing, *_mixes(train, settings.mixes, settings, settings.seed)]
    held_mixes = _mixes(held, min(settings.val_rows * 2, settings.mixes), settings, settings.seed + 1)
    groups = [(train, name, rows) for name, rows in train.items()]
    groups += [(held, name, rows) for name, rows in held.items()]
    groups += [(train, MIXED, mixes), (held, MIXED, held_mixes)]
    flat = [row for _, _, rows in groups for row in rows]
    encoded = encode_all(tokenizer, flat, settings.max_length, ticker)
    tokens = [token_row(e, row, experts) for e, row in zip(encoded, flat, strict=True)]
    out: dict[int, dict[str, list[TokenRow]]] = {id(train): {}, id(held): {}}
    at = 0
    for part, name, rows in groups:
        kept = [t for t in tokens[at : at + len(rows)] if bool((t.labels >= 0).any())]
        at += len(rows)
        out[id(part)][name] = kept
        if part is train and name != MIXED and not kept:
            raise InputError(f"{name}: no row has a token to learn from", "give rows with text in them")
    cut = sum(e.cut for e in encoded)
    if cut:
        notes.append(f"{cut} of {len(flat)} rows are cut to {settings.max_length} tokens")
    return RouterRows(
        experts=experts,
        train=out[id(train)],
        held_out=out[id(held)],
        documents={name: len({document_key(r) for r in rows}) for name, rows in domains.items()},
        digests={name: rows_digest(rows) for name, rows in domains.items()},
        notes=notes,
        seen=pack([row for rows in (*train.values(), *held.values()) for row in rows]),
        cuts=tuple(sorted({int(i) for i in tokenizer.all_special_ids})),
    )


def collate(rows: Sequence[TokenRow]) -> tuple[Tensor, Tensor, Tensor]:
    """Right-padded (B, T) ids, labels (padding NO_LABEL) and completion (padding False).

    Everything that reads them is causal, so that padding on the right needs no mask.
    """
    width = max(len(r.ids) for r in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.int64)
    labels = torch.full((len(rows), width), NO_LABEL)
    completion = torch.zeros(len(rows), width, dtype=torch.bool)
    for i, row in enumerate(rows):
        n = len(row.ids)
        ids[i, :n], labels[i, :n], completion[i, :n] = row.ids, row.labels, row.completion
    return ids, labels, completion


def collate_ahead(rows: Sequence[TokenRow]) -> tuple[Tensor, Tensor]:
    """Right-padded (B, T) `led` (padding NO_LABEL) and `lead` (padding False)."""
    width = max(len(r.ids) for r in rows)
    labels = torch.full((len(rows), width), NO_LABEL)
    lead = torch.zeros(len(rows), width, dtype=torch.bool)
    for i, row in enumerate(rows):
        n = len(row.ids)
        labels[i, :n] = row.led
        if row.lead is not None:
            lead[i, :n] = row.lead
    return labels, lead


def draw_batch(rows: RouterRows, settings: RouterSettings, step: int) -> list[TokenRow]:
    """The rows of step number `step`: a share of mixes, the rest with every domain equally likely.

    Depends on the seed and the step alone, so that a resumed run draws what the uninterrupted one draws.
    """
    rng = random.Random(f"{settings.seed} {step}")
    mixes = rows.train.get(MIXED, [])
    batch = []
    for _ in range(settings.batch):
        if mixes and rng.random() < settings.mix_share:
            batch.append(rng.choice(mixes))
        else:
            batch.append(rng.choice(rows.train[rng.choice(rows.experts)]))
    return batch
