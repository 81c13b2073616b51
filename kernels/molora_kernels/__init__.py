"""Per-token dispatch of LoRA adapters: the ops, each with its plain torch twin."""
