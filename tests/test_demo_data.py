"""What ships with the demo: four adapters and the router's training examples."""

from __future__ import annotations

import ast
import json
import re
import sqlite3
from pathlib import Path

import pytest

from molora_cli.core.training.data import Example, read_examples

DEMO = Path(__file__).parents[1] / "recipes" / "demo"
DOMAINS = ("math", "code", "sql", "med")
LINEARS = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
# wording that the format of a domain brings along
BOILERPLATE = ("your code should", "code should pass", "should pass this test", "research or clinical trials")


def rows(domain: str) -> list[Example]:
    """Those that train the router, then those that measure it."""
    return [e for part in ("data", "test") for e in read_examples(DEMO / part / f"{domain}.jsonl")]


def grams(text: str, n: int = 8) -> set[str]:
    words = re.findall(r"[a-z0-9]+", text.lower())
    return {" ".join(words[i : i + n]) for i in range(len(words) - n + 1)}


def test_adapters_are_small() -> None:
    files = [p for p in (DEMO / "adapters").rglob("*") if p.is_file()]
    assert {p.parent.name for p in files} == set(DOMAINS)
    assert sum(p.stat().st_size for p in files) <= 12_000_000


@pytest.mark.parametrize("domain", DOMAINS)
def test_adapter_is_a_plain_peft_folder(domain: str) -> None:
    from peft import LoraConfig
    from safetensors import safe_open

    folder = DEMO / "adapters" / domain
    config = LoraConfig.from_pretrained(str(folder))
    assert config.base_model_name_or_path == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert set(config.target_modules) == LINEARS and not config.use_dora
    with safe_open(folder / "adapter_model.safetensors", framework="np") as file:
        shapes = {k: tuple(file.get_slice(k).get_shape()) for k in file.keys()}  # noqa: SIM118
        dtypes = {file.get_slice(k).get_dtype() for k in shapes}
    assert dtypes == {"BF16"} and len(shapes) == 30 * len(LINEARS) * 2
    assert all(s[0] == config.r if ".lora_A." in k else s[1] == config.r for k, s in shapes.items())


@pytest.mark.parametrize("domain", DOMAINS)
def test_adapter_says_where_it_comes_from(domain: str) -> None:
    card = (DEMO / "adapters" / domain / "README.md").read_text(encoding="utf-8")
    assert "molora train-adapter" in card and "sha256" in card
    assert re.search(r"MIT|CC BY 4.0|BSD", card)
    base, tuned = (
        float(re.search(rf"^{w}: ([\d.]+)", card, re.M).group(1)) for w in ("base", "with the adapter")
    )
    assert tuned < 0.85 * base
    for path in (DEMO / "adapters" / domain).iterdir():
        assert not re.search(rb"/(home|work|tmp|root|Users)/", path.read_bytes())


@pytest.mark.parametrize("domain", DOMAINS)
def test_enough_examples_without_duplicates(domain: str) -> None:
    examples = rows(domain)
    assert len(examples) >= 60
    assert all([m.role for m in e.messages] == ["user", "assistant"] for e in examples)
    for turn in (0, 1):
        assert len({e.contents[turn] for e in examples}) == len(examples)
    assert not any(
        d != domain and {e.contents for e in rows(d)} & {e.contents for e in examples} for d in DOMAINS
    )


def _value(expression: str) -> float:
    """A sum of products of numbers, by the parser of Python and nothing else of it."""
    node = ast.parse(expression, mode="eval")
    allowed = (ast.Expression, ast.BinOp, ast.UnaryOp, ast.Constant, ast.operator, ast.unaryop)
    assert all(isinstance(n, allowed) for n in ast.walk(node)), expression
    return float(eval(compile(node, "sum", "eval"), {"__builtins__": {}}))  # noqa: S307


def test_math_examples_are_right() -> None:
    for example in rows("math"):
        *steps, last = example.contents[1].split("\n")
        assert re.fullmatch(r"#### -?[\d.]+", last)
        text = "\n".join(steps)
        sums = re.findall(r"(-?[\d.]+(?: [-+*/] (?:\([^)]*\)|[\d.]+))+) = (-?[\d.]*\d)", text)
        assert sums, text
        for expression, result in sums:
            assert _value(expression) == pytest.approx(float(result)), expression
        assert last.removeprefix("#### ") in re.findall(r"-?[\d.]*\d", text)


def test_code_examples_parse_and_pass_their_tests() -> None:
    """The functions are this repository's own, so they may run here."""
    for example in rows("code"):
        fenced = re.fullmatch(r"```python\n(.*)\n```", example.contents[1], re.S)
        assert fenced, example.contents[1]
        space: dict[str, object] = {}
        exec(compile(fenced[1], "example", "exec"), space)
        named = re.findall(r"def (\w+)\(|class (\w+)", example.contents[0] + fenced[1])
        assert named
        for test in re.findall(r"^.*pass this test: (assert .*)$", example.contents[0], re.M):
            exec(test, space)


def test_sql_examples_run_on_their_table() -> None:
    for example in rows("sql"):
        schema, question = example.contents[0].split("\n")
        columns = re.fullmatch(r"CREATE TABLE data \((.*)\)", schema)[1].split(", ")
        assert question
        with sqlite3.connect(":memory:") as table:
            table.execute("CREATE TABLE data (" + ", ".join(f'"{c}"' for c in columns) + ")")
            table.execute(example.contents[1]).fetchall()
        bare = re.sub(r'"[^"]*"', "", example.contents[1])
        assert set(re.findall(r"\b[a-z]\w*", bare)) <= {*columns, "data"}


def test_examples_share_no_eight_words_with_the_real_data(data: Path) -> None:
    theirs: set[str] = set()
    for path in data.rglob("*.jsonl"):
        for line in path.read_text(encoding="utf-8").splitlines():
            for message in json.loads(line)["messages"]:
                theirs |= grams(message["content"])
    for domain in DOMAINS:
        for example in rows(domain):
            shared = {g for text in example.contents for g in grams(text)} & theirs
            assert not [g for g in shared if not any(b in g for b in BOILERPLATE)], example.contents
