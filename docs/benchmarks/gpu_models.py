"""Configs in the shapes of real models, for random weights made on the spot; small: one tiny layer."""

from __future__ import annotations

from typing import Any

TINY: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "head_dim": 16}
TINY |= {"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 64}


def smollm2(small: bool) -> Any:
    from transformers import LlamaConfig

    sizes: dict[str, Any] = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30}
    sizes |= {"num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152}
    return LlamaConfig(
        **(sizes | (TINY if small else {})), max_position_embeddings=8192, tie_word_embeddings=True
    )


def qwen3(small: bool) -> Any:
    from transformers import Qwen3Config

    sizes: dict[str, Any] = {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "head_dim": 128,
    }
    sizes |= {"num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": 151936}
    return Qwen3Config(
        **(sizes | (TINY if small else {})), max_position_embeddings=8192, tie_word_embeddings=True
    )
