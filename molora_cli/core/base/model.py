"""The base as a transformers model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from molora_cli.core.base.structure import read_config
from molora_cli.errors import InputError, MoloraError
from molora_cli.text import shorten


def pick_device(device: str = "auto") -> str:
    """ "auto" is the first GPU that torch sees, else the CPU. Raises InputError for a device that is not
    there."""
    import torch

    if device == "auto":
        if torch.cuda.is_available():
            return "cuda"
        return "mps" if torch.backends.mps.is_available() else "cpu"
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise InputError(f"torch sees no GPU, but the device '{device}' was asked for", "--device cpu")
    return device


def pick_dtype(dtype: Any, device: str) -> Any:
    """ "auto" is float32 on the CPU (bfloat16 is slower there on most machines), else the checkpoint's own
    ("auto" of
    transformers); otherwise a torch dtype or its name. Raises InputError for an unknown name."""
    import torch

    if dtype == "auto":
        return torch.float32 if device == "cpu" else "auto"
    if isinstance(dtype, str):
        found = getattr(torch, dtype, None)
        if not isinstance(found, torch.dtype) or not found.is_floating_point:
            raise InputError(
                f"'{shorten(dtype)}' is not a float type of torch", "use float32, bfloat16 or float16"
            )
        return found
    return dtype


def load_tokenizer(path: Path, *, trust_remote_code: bool = False) -> Any | None:
    """The base's tokenizer; None where the folder holds none. Raises InputError where it cannot be read."""
    from transformers import AutoTokenizer

    files = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json", "spiece.model")
    if not any((path / name).is_file() for name in files):
        return None
    try:
        return AutoTokenizer.from_pretrained(
            str(path), trust_remote_code=trust_remote_code, local_files_only=True
        )
    except Exception as error:  # a tokenizer library raises what it likes on a damaged file
        raise InputError(
            f"the tokenizer in {path} cannot be loaded: {shorten(str(error), 160)}", "download the base again"
        ) from error


def _auto_class(path: Path) -> Any:
    """Causal LM, or the model of text and images that the folder was saved from (Chameleon, Emu3), which as a
    causal LM would be refused, or lose the part that reads images."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

    config = read_config(path)
    name = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(str(config.get("model_type")))
    saved = config.get("architectures") or []
    return AutoModelForImageTextToText if name in saved else AutoModelForCausalLM


def load_base_model(
    path: Path, *, dtype: Any = "auto", device: str = "auto", trust_remote_code: bool = False
) -> tuple[Any, Any | None]:
    """The causal LM in `path`, in eval mode with frozen weights, and its tokenizer (None where there is
    none).

    dtype, device: see `pick_dtype`, `pick_device`. Code that comes with the model runs only with
    `trust_remote_code`. Raises InputError (needs remote code, cannot be loaded), MoloraError (out of memory).
    """
    import torch
    from transformers.utils import logging

    place = pick_device(device)
    kind = pick_dtype(dtype, place)
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        model: Any = _auto_class(path).from_pretrained(
            str(path), dtype=kind, trust_remote_code=trust_remote_code, local_files_only=True
        )
        quantised = getattr(model, "is_quantized", False)
        model = model if quantised else model.to(place)
    except torch.OutOfMemoryError as error:
        raise MoloraError(
            f"the base {path} does not fit into {place}'s memory", "--device cpu, or a smaller dtype"
        ) from error
    except (ValueError, OSError, ImportError, RuntimeError, KeyError, AttributeError) as error:
        if "trust_remote_code" in str(error):
            raise InputError(
                f"the base {path} comes with its own code, which does not run unasked",
                "read that code, then allow it: --trust-remote-code",
            ) from error
        raise InputError(
            f"the base {path} cannot be loaded: {shorten(str(error), 200)}",
            "check the folder, or download it again",
        ) from error
    finally:
        logging.set_verbosity(level)
        logging.enable_progress_bar()
    model.requires_grad_(False)
    model.eval()
    return model, load_tokenizer(path, trust_remote_code=trust_remote_code)
