"""Recipes: every file that ships is valid, and `molora run` runs their steps in order."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from molora_cli.app import app
from molora_cli.core.bundle.store import Bundle
from molora_cli.errors import InputError
from molora_cli.recipes import sections

RECIPES = sorted((Path(__file__).parents[1] / "recipes").glob("*.yaml"))


@pytest.mark.parametrize("file", RECIPES, ids=lambda p: p.stem)
def test_recipes_that_ship_are_valid_and_open_with_their_command(file: Path) -> None:
    steps = sections(file)
    command = file.read_text(encoding="utf-8").splitlines()[0]
    assert command.startswith("# molora ") and (command.split()[2] in ("run", *steps))


def test_run_goes_through_the_steps(
    tiny_llama: Path, make_adapter: Callable[..., Path], tmp_path: Path
) -> None:
    adapters = [make_adapter(tiny_llama, name, seed) for seed, name in enumerate(("one", "two"))]
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        f"compose:\n  output: out\n  base: {tiny_llama}\n"
        f"  adapters: {{one: {adapters[0]}, two: {adapters[1]}}}\n"
        "attach-router:\n  bundle: out\n  kind: fixed\n  expert: {one: 1, two: 3}\n"
    )
    done = CliRunner().invoke(app, ["run", str(recipe), "-q"])
    assert done.exception is None, done.exception
    spec = Bundle.open(tmp_path / "out").router_spec
    assert spec is not None and spec.stages[0].params["weights"] == [1.0, 3.0]
    again = CliRunner().invoke(app, ["run", str(recipe), "-q", "--only", "attach-router"])
    assert isinstance(again.exception, InputError) and "has a router already" in str(again.exception)
    forced = ["run", str(recipe), "-q", "--only", "attach-router", "--force"]
    assert CliRunner().invoke(app, forced).exception is None
    unknown = CliRunner().invoke(app, ["run", str(recipe), "--only", "eval"])
    assert isinstance(unknown.exception, InputError) and "it has: compose" in unknown.exception.remedy


def test_a_recipe_is_checked_whole_before_its_first_step(tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text("compose:\n  output: out\nattach-router:\n  kinds: fixed\n")
    with pytest.raises(InputError, match=r"attach-router\.kinds: no such option"):
        sections(recipe)
    recipe.write_text("compose: {}\nchat: {}\n")
    with pytest.raises(InputError, match="'chat', which is no command"):
        sections(recipe)
