"""A .gguf file as an ordinary transformers folder: bf16 safetensors, config, tokenizer, chat template."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import importlib.util
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from molora_cli.errors import InputError, MoloraError
from molora_cli.out import Ticker, no_ticks
from molora_cli.text import shorten

_MAGIC = b"GGUF"


def check_gguf(file: Path) -> None:
    """Refuse what cannot be converted before anything heavy is imported. Raises InputError."""
    if not file.is_file():
        raise InputError(f"{file} is not a file", "check the path of the .gguf file")
    with file.open("rb") as handle:
        start = handle.read(4)
    if start != _MAGIC:
        raise InputError(f"{file} is not a GGUF file (it starts with {start!r})", "download it again")
    if importlib.util.find_spec("gguf") is None:
        raise InputError(f"{file} needs the package gguf to be read", "pip install 'molora[gguf]'")


@contextlib.contextmanager
def _read_once() -> Iterator[None]:
    """While it is open, transformers parses a GGUF header once, from plain memory, and draws no bar of its
    own.

    transformers opens the file three times (tokenizer, config, weights) and builds the table of tensor names
    once per submodule: two thirds of the time of a small model's conversion. Both are pure functions of their
    arguments, so remembering them changes nothing else.
    """
    import gguf
    import numpy as np
    from transformers import modeling_gguf_pytorch_utils as loader

    class Reader(gguf.GGUFReader):
        """Slices of a plain array cost a fifth of those of a memory map object; a header takes a million."""

        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, value.view(type=np.ndarray) if name == "data" else value)

    def plain(items: Any, **_: Any) -> Any:
        return items

    changes = [
        (gguf, "GGUFReader", functools.cache(Reader)),
        (gguf, "get_tensor_name_map", functools.cache(gguf.get_tensor_name_map)),
        (loader, "tqdm", plain),
    ]
    kept = [(module, name, getattr(module, name)) for module, name, _ in changes if hasattr(module, name)]
    try:
        for module, name, value in changes:
            setattr(module, name, value)
        yield
    finally:
        for module, name, value in kept:
            setattr(module, name, value)


def convert_gguf(file: Path, folder: Path, *, base_id: str, ticker: Ticker = no_ticks) -> None:
    """Write `file` as a transformers folder into the existing `folder`.

    base_id: what the config will say it is. Weights are dequantised and stored as bfloat16.
    Raises InputError for a file that transformers cannot load, MoloraError where the result is not whole.
    """
    import torch

    check_gguf(file)
    with _silent():
        ticker(0, 3, "tokenizer")
        model, tokenizer = _load(file, ticker)
        ticker(2, 3, "writing")
        # transformers takes it for a quantised model and would refuse to save it; its weights are plain
        # floats
        model.hf_quantizer = None
        model.is_quantized = False
        model.config.__dict__.pop("quantization_config", None)
        model.to(torch.bfloat16).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    _name_config(folder / "config.json", base_id)
    if not (folder / "tokenizer.json").is_file():
        raise MoloraError(
            f"{file} was converted without a tokenizer", "use a safetensors folder of this base"
        )
    ticker(3, 3)


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """No log lines and no bars of transformers: molora shows its own progress."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        logging.enable_progress_bar()


def _load(file: Path, ticker: Ticker) -> tuple[Any, Any]:
    import gguf
    import torch
    import transformers

    # on Python 3.10 older transformers ask the module for its version, which it does not name
    if not hasattr(gguf, "__version__"):
        setattr(gguf, "__version__", importlib.metadata.version("gguf"))  # noqa: B010
    place, name = str(file.parent.resolve()), file.name
    try:
        with _read_once():
            tokenizer = transformers.AutoTokenizer.from_pretrained(place, gguf_file=name)
            _special_tokens(file, tokenizer)
            ticker(1, 3, "weights")
            model = transformers.AutoModelForCausalLM.from_pretrained(
                place, gguf_file=name, dtype=torch.float32
            )
    except Exception as error:  # on a damaged file the readers raise whatever they run into
        raise InputError(
            f"{file} cannot be read as a model: {shorten(str(error), 160)}",
            "use a safetensors folder of this base, or a .gguf of a model that transformers supports",
        ) from error
    return model, tokenizer


def _special_tokens(file: Path, tokenizer: Any) -> None:
    """Set the special tokens that the file's header names: older transformers take bos for eos."""
    import gguf

    fields = gguf.GGUFReader(str(file)).fields
    for kind, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown")):
        field = fields.get(f"tokenizer.ggml.{key}_token_id")
        token = None if field is None else tokenizer.convert_ids_to_tokens(int(field.contents()))
        if token is not None:
            setattr(tokenizer, f"{kind}_token", token)


def _name_config(file: Path, base_id: str) -> None:
    config = json.loads(file.read_text(encoding="utf-8"))
    config.pop("_model_name_or_path", None)
    config["_name_or_path"] = base_id
    file.write_text(json.dumps(config, indent=2, sort_keys=True) + os.linesep, encoding="utf-8")
