"""Which token ids stand for images, video or audio: read from a model's config and its tokenizer's tokens.

Three sources, all by name: a `vocabulary_map` (Chameleon's `IMGIMG...`, Emu3's `<|visual token ...|>` and
the row ends between them), the placeholder ids that configs name (`image_token_id`, `audio_token_index`,
...), and numbered series of tokens whose names say what they are (`<|audio_0017|>`). Text is what is left. No
torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

MODALITIES = ("image", "video", "audio")
TEXT = "text"
_WORDS = {
    "image": r"image|img|visual|vision",
    "video": r"video",
    "audio": r"audio|speech|sound",
}
# letters before the number decide; `<|image_3|>` and `IMGIMGABZ` are of a series, `<|image start|>` is not
_NUMBERED = re.compile(r"\A\W*([A-Za-z][A-Za-z _|-]*?)[ _|-]*\d+\W*\Z")
_CHAMELEON = re.compile(r"\AIMGIMG[A-Z]*\Z")
_EMU3_VISUAL = "<|visual token"
_EMU3_ROW_END = "<|extra_200|>"
_SERIES = 8  # tokens that make a series: a few numbered markers are no codebook


def modality_ids(config: Mapping[str, Any], tokens: Mapping[str, int]) -> dict[str, frozenset[int]]:
    """Modality -> its token ids, for the modalities that are found.

    config: the base's config.json; tokens: name -> id of the tokenizer's added tokens. Placeholders, which
    the model fills with features of an image or a sound, belong to their modality. The markers around an
    image (begin, end) are text: the text adapter has to write them.
    """
    found: dict[str, set[int]] = {name: set() for name in MODALITIES}
    mapped = config.get("vocabulary_map")
    names = {str(k): int(v) for k, v in mapped.items() if _whole(v)} if isinstance(mapped, Mapping) else {}
    for name, i in names.items():
        if _CHAMELEON.match(name) or name.startswith(_EMU3_VISUAL) or name == "<image>":
            found["image"].add(i)
    if any(name.startswith(_EMU3_VISUAL) for name in names) and _EMU3_ROW_END in names:
        found["image"].add(names[_EMU3_ROW_END])  # every row of an image ends with it
    for modality in MODALITIES:
        for key in (f"{modality}_token_id", f"{modality}_token_index"):
            if _whole(config.get(key)):
                found[modality].add(int(config[key]))
    for ids, modality in _series(tokens):
        found[modality] |= ids
    return {name: frozenset(ids) for name, ids in found.items() if ids}


def _series(tokens: Mapping[str, int]) -> list[tuple[set[int], str]]:
    """Numbered tokens by what their common name says."""
    groups: dict[str, set[int]] = {}
    for name, i in tokens.items():
        match = _NUMBERED.match(name)
        if match:
            groups.setdefault(match[1].lower(), set()).add(i)
    named = []
    for word, ids in groups.items():
        modality = next((m for m, words in _WORDS.items() if re.search(words, word)), None)
        if modality is not None and len(ids) >= _SERIES:
            named.append((ids, modality))
    return named


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
