"""Fixtures: folders of known cases and data where they are at hand, and tiny models made on the spot."""

from __future__ import annotations

import io
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# a shell that starts the tests in the background has them ignore Ctrl-C, and their children with them
signal.signal(signal.SIGINT, signal.default_int_handler)

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def _folder(variable: str) -> Path:
    value = os.environ.get(variable)
    if not value:
        pytest.skip(f"{variable} is not set")
    path = Path(value)
    assert path.is_dir(), f"{variable}={value} is not a folder"
    return path


@pytest.fixture(scope="session")
def cases() -> Path:
    """Inputs with known answers; skipped without $MOLORA_CASES."""
    return _folder("MOLORA_CASES")


@pytest.fixture(scope="session")
def data() -> Path:
    """Train, val and test rows of four domains; skipped without $MOLORA_DATA."""
    return _folder("MOLORA_DATA")


@pytest.fixture(autouse=True)
def _quiet_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads or writes the user's own state, or asks a hub."""
    monkeypatch.setenv("MOLORA_HOME", str(tmp_path_factory.mktemp("home")))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("MOLORA_COMPILE", "off")
    monkeypatch.setenv("TERM", os.environ.get("TERM", "xterm"))


def write_tokenizer(folder: Path, vocab_size: int = 320) -> None:
    """A byte-level tokenizer with no merges: 64 special or spare ids, then 256 bytes."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<unk>"]
    words = special + [f"<spare{i}>" for i in range(64 - len(special))] + alphabet
    tokenizer = Tokenizer(models.BPE(vocab={w: i for i, w in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(s, special=True) for s in special])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>"
    )
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved Llama: 4 layers, hidden 64, vocabulary 320, context 256, fp32, tokenizer, chat template."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("bases") / "tiny-llama"
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=320,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def make_adapter(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """make_adapter(base_folder, name, seed=0, **LoraConfig arguments) -> a PEFT folder, B not zero."""

    def make(base: Path, name: str, seed: int = 0, **options: object) -> Path:
        import torch
        from peft import LoraConfig, get_peft_model
        from transformers import AutoModelForCausalLM

        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        settings = {
            "r": 4,
            "lora_alpha": 8,
            "target_modules": ["q_proj", "v_proj"],
            "task_type": "CAUSAL_LM",
            **options,
        }
        peft_model = get_peft_model(model, LoraConfig(**settings))
        for key, parameter in peft_model.named_parameters():
            if "lora_B" in key or "lora_embedding_B" in key or "lora_embedding_A" in key:
                torch.nn.init.normal_(parameter, std=0.1)
        folder = tmp_path_factory.mktemp("adapters") / name
        peft_model.save_pretrained(folder)
        return folder

    return make


@pytest.fixture(scope="session")
def trio(tiny_llama: Path, make_adapter: Callable[..., Path]) -> dict[str, Path]:
    """Three plain adapters of the tiny base: one, two, new."""
    return {
        name: make_adapter(tiny_llama, f"t-{name}", seed=i) for i, name in enumerate(("one", "two", "new"))
    }


@pytest.fixture(scope="session")
def made_pair(tiny_llama: Path, trio: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of the adapters one and two, to be copied and not changed."""
    from typer.testing import CliRunner

    from molora_cli.app import app

    folder = tmp_path_factory.mktemp("bundles") / "pair"
    pairs = [f"{name}={trio[name]}" for name in ("one", "two")]
    result = CliRunner().invoke(app, ["compose", "-o", str(folder), "--base", str(tiny_llama), *pairs, "-q"])
    assert result.exit_code == 0, result.output
    return folder


@pytest.fixture(scope="session")
def cpu_kernels() -> None:
    """The compiled CPU operators; tests that need them are skipped where they cannot be."""
    from molora_kernels import resolve

    try:
        resolve("cpu")
    except ValueError as error:
        pytest.skip(str(error))


@pytest.fixture
def pair(made_pair: Path, tmp_path: Path) -> Path:
    """A bundle of the adapters one and two, in tmp_path."""
    return Path(shutil.copytree(made_pair, tmp_path / "pair"))


@pytest.fixture(scope="session")
def chat_bundle(
    tiny_llama: Path, make_adapter: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Two random adapters on the tiny base, not to be changed; ids 64 to 150 take `math`, from 200 on `code`,
    the others the base."""
    from molora_cli.core.bundle.store import Bundle
    from molora_cli.core.compose import Request, compose, plan
    from molora_cli.core.router.attach import Request as Rules
    from molora_cli.core.router.attach import attach

    adapters = tuple(
        (name, str(make_adapter(tiny_llama, name, seed=i))) for i, name in enumerate(("math", "code"))
    )
    folder = tmp_path_factory.mktemp("chat") / "bundle"
    compose(plan(Request(output=folder, adapters=adapters, base=str(tiny_llama))))
    opened = Bundle.open(folder)
    made = attach(opened, Rules(kind="vocab", rules=("math=range:64-150", "code=range:200-319"), rest="base"))
    opened.set_router(made.spec, made.tensors)
    return folder


@pytest.fixture(scope="session")
def loaded_chat(chat_bundle: Path) -> Any:
    from molora_cli import load

    return load(chat_bundle)


@pytest.fixture
def chat_model(loaded_chat: Any) -> Iterator[Any]:
    """`chat_bundle` loaded; whatever a test sets is taken back."""
    template = loaded_chat.tokenizer.chat_template
    yield loaded_chat
    loaded_chat.tokenizer.chat_template = template
    loaded_chat.auto()
    loaded_chat.muted = frozenset()
    loaded_chat.router.k = loaded_chat.router.temperature = None


@pytest.fixture
def make_repl() -> Callable[..., Any]:
    """make_repl(model, width=200, **console) -> a chat whose screen is in memory: said(line) is what a line
    gives beside the answer, answered() what the answers gave since it was asked last."""
    from rich.console import Console

    from molora_cli.core.chat_session import ChatSession, Settings
    from molora_cli.out import Out
    from molora_cli.views.palette import Palette
    from molora_cli.views.repl import Repl

    class Heard(Repl):
        def said(self, line: str) -> str:
            _taken(self.out.stderr)
            assert self.handle(line)
            return _taken(self.out.stderr)

        def answered(self) -> str:
            return _taken(self.out.stdout)

    def make(model: Any, width: int = 200, **console: Any) -> Heard:
        session = ChatSession(model, notify=lambda message: None)
        session.settings = Settings(max_new_tokens=5, ignore_eos=True)
        out = Out()
        out.stdout = Console(file=io.StringIO(), width=width, _environ={}, **console)
        out.stderr = Console(file=io.StringIO(), width=width, _environ={})
        return Heard(session, out, Palette(model.adapters, out.stdout))

    return make


def _taken(console: Any) -> str:
    text = str(console.file.getvalue())
    console.file.seek(0)
    console.file.truncate()
    return text
