"""A compiled step out of the compiler, in a chat; and on the real base, against forwards."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from molora_cli.core.generate import encode_prompt, stream_ids
from molora_cli.core.routed.model import RoutedModel, load
from molora_cli.core.runtime import package
from molora_cli.core.runtime.build import build
from molora_cli.core.runtime.package import PackageError, failure, make_now, package_path
from molora_cli.core.runtime.runtime import Runtime, shape_of

pytestmark = pytest.mark.usefixtures("cpu_kernels")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def answer(model: RoutedModel, ids: list[int], new: int, **options: Any) -> list[Any]:
    return list(stream_ids(model, ids, max_new_tokens=new, **options))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_package_is_built_beside_a_chat_and_found_by_the_next(
    chat_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two chats begin at once: one build."""
    monkeypatch.setattr(package, "folder", lambda: tmp_path)
    model, other = load(chat_bundle, backend="cpu"), load(chat_bundle, backend="cpu")
    ids = list(range(70, 100))
    wanted = {route: answer(model, ids, 24, route=route) for route in ("auto", "code", "off")}
    runtime = model.runtime = Runtime(model)
    path = package_path(json.loads(json.dumps(shape_of(model).document())))
    while not package.is_building(path):
        assert failure(path) is None
        time.sleep(0.1)
    begun = len(names(tmp_path))
    Runtime(other)
    assert len(names(tmp_path)) == begun
    limit = time.monotonic() + 800
    while not runtime.ready:
        assert failure(path) is None, failure(path)
        assert time.monotonic() < limit
        [*answer(model, ids, 24)]
        time.sleep(1)
    assert names(tmp_path) == [path.name]  # nothing else is left
    started = time.monotonic()
    other.runtime = Runtime(other)
    assert other.runtime.ready and other.runtime.builds == 0 and time.monotonic() - started < 5
    for routed in (model, other):
        for route, events in wanted.items():
            got = answer(routed, ids, 24, route=route)
            assert [e.id for e in got] == [e.id for e in events]
            assert all(abs(a.logprob - b.logprob) < 1e-4 for a, b in zip(got, events, strict=True))


@pytest.mark.slow
def test_a_build_that_fails_leaves_its_reason(tmp_path: Path) -> None:
    document = {
        "kind": "NoSuchModel",
        "config": {},
        "dtype": "float32",
        "adapters": False,
        "extra": [],
        "scaled": [],
        "biased": [],
        "taps": [],
        "int8": [],
    }
    path = tmp_path / "step-0.pt2"
    with pytest.raises(PackageError, match="NoSuchModel is no model of transformers"):
        build(document, path)
    assert names(tmp_path) == []
    make_now(document, path)  # in a process of its own
    assert names(tmp_path) == ["step-0.failed"] and "NoSuchModel" in str(failure(path))


PROMPTS = [
    "What is 17 * 24?",
    "Write a python function to count the vowels in a string.",
    "Select the names of all users older than 30 in SQL.",
    "Explain what a contract is.",
    "Name three rivers in Europe.",
    "Translate 'good morning' to French.",
    "Why is the sky blue?",
    "List the first ten prime numbers.",
    "What does the keyword yield do in python?",
    "Count users by country in SQL, then explain the query.",
    "A train goes 60 km in 45 minutes. How fast is it?",
    "Write a haiku about the sea.",
    "What is the capital of Norway?",
    "Sort a list of tuples by the second element in python.",
    "Is a verbal agreement binding?",
    "How do I boil an egg?",
    "What is the derivative of x squared?",
    "Give me a synonym of 'quick'.",
    "Who wrote Hamlet?",
    "Write a regular expression for a date.",
]


@pytest.mark.slow
@pytest.mark.real
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_greedy_text_on_the_real_base(dtype: str, tmp_path: Path) -> None:
    """The compiled step says what forwards say, except where the best two tokens are as good as equal."""
    from molora_cli.core.base.embedded import embedded_file
    from molora_cli.core.base.model import load_base_model
    from molora_cli.core.base.resolve import resolve_base
    from molora_cli.core.bench.material import random_factors

    if embedded_file() is None:
        pytest.skip("no embedded base")
    base, tokenizer = load_base_model(resolve_base("smollm2").path, dtype=dtype, device="cpu")
    model = RoutedModel(base, random_factors(base, 4, 16), tokenizer=tokenizer, backend="cpu").eval()
    runtime = Runtime(model, make=make_now)
    runtime.look()
    assert runtime.ready
    # of the largest logit: bfloat16 has eight bits, and its logits are rounded themselves
    rounding = 1e-4 if dtype == "float32" else 2**-6
    differing = 0
    for number, prompt in enumerate(PROMPTS):
        ids = encode_prompt(model, [{"role": "user", "content": prompt}])
        route = ("off", *model.adapters)[number % 5]
        model.runtime = None
        wanted = [event.id for event in answer(model, ids, 32, route=route)]
        model.runtime = runtime
        got = [event.id for event in answer(model, ids, 32, route=route)]
        first = next((i for i, pair in enumerate(zip(wanted, got, strict=False)) if len({*pair}) > 1), None)
        if first is None:
            assert len(wanted) == len(got)
            continue
        model.only(route) if route != "off" else model.off()
        with torch.no_grad():
            logits = model(torch.tensor([[*ids, *wanted[:first]]])).logits[0, -1].float()
        gap = float((logits[wanted[first]] - logits[got[first]]).abs() / logits.abs().max())
        assert gap <= rounding, f"{prompt!r}, token {first}: {gap}"
        differing += 1
    assert differing <= (0 if dtype == "float32" else 10) and runtime.builds <= 1
