"""Options from a YAML recipe, and the one rule of precedence: flag, then environment, then recipe, then
default.

A recipe's top-level keys are commands; below one stand that command's options:

    compose:
      output: my-bundle
      base: smollm2
      adapters: {math: ./adapters/math}

Relative paths are relative to the recipe. Only plain YAML is read: no tags, no code.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from molora_cli.errors import InputError
from molora_cli.text import shorten

_LIMIT = 1 << 20  # bytes; a recipe is a page of text
_YES = frozenset({"1", "true", "yes", "on"})
_NO = frozenset({"0", "false", "no", "off", ""})


def load_recipe(path: Path, command: str) -> dict[str, Any]:
    """The options that the recipe `path` sets for `command`, checked against its section in
    `molora_cli.recipe_sections`.

    Raises InputError: no such file, not YAML, no such command in it, an unknown option or a wrong type.
    """
    from pydantic import ValidationError

    # pydantic costs as much as the rest of --help together: commands import this module, not that one
    from molora_cli.recipe_sections import SECTIONS

    schema = SECTIONS[command]
    raw = _read(path)
    if command not in raw:
        found = ", ".join(shorten(key, 30) for key in raw)
        raise InputError(
            f"{path} has nothing for '{command}' (it has: {found or 'nothing'})", f"add a key '{command}:'"
        )
    section = raw[command] if raw[command] is not None else {}
    try:
        checked = schema.model_validate(section, context={"folder": path.parent})
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in (command, *first["loc"]))
        known = ", ".join(sorted(schema.model_fields))
        message = "no such option" if first["type"] == "extra_forbidden" else first["msg"]
        raise InputError(f"{path}: {shorten(field)}: {shorten(message)}", f"options are: {known}") from error
    return checked.model_dump(exclude_unset=True)


def sections(path: Path) -> list[str]:
    """The commands that a recipe has options for, in its order; all are checked before one is run.

    Raises InputError as `load_recipe` does, and for a key that is no command.
    """
    from molora_cli.recipe_sections import SECTIONS

    names = list(_read(path))
    unknown = [name for name in names if name not in SECTIONS]
    if unknown or not names:
        what = f"a key '{shorten(unknown[0], 40)}', which is no command" if unknown else "no keys"
        raise InputError(f"the recipe {path} has {what}", f"a recipe's keys are: {', '.join(SECTIONS)}")
    for name in names:
        load_recipe(path, name)
    return names


def _read(path: Path) -> dict[str, Any]:
    """The YAML document of a recipe as a mapping. Raises InputError."""
    import yaml

    try:
        size = path.stat().st_size
        if size > _LIMIT:
            raise InputError(
                f"{path} has {size} bytes, too many for a recipe", "name the YAML file of a recipe"
            )
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise InputError(f"the recipe {path} cannot be read: {error.strerror}", "check the path") from error
    except UnicodeDecodeError as error:
        raise InputError(f"the recipe {path} is not UTF-8 text", "save it as UTF-8") from error
    try:
        raw = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or str(error)
        raise InputError(f"{path}{where} is not YAML: {shorten(problem)}", "correct the recipe") from error
    return {str(key): value for key, value in raw.items()} if isinstance(raw, dict) else {}


@dataclass(frozen=True)
class Setting:
    """A value and where it came from: "flag", "environment (MOLORA_X)", "recipe" or "default"."""

    value: Any
    source: str


def _from_environment(name: str, default: Any) -> Any:
    """The value of MOLORA_<NAME> in the default's type; None where it is not set. Lists and mappings have
    none."""
    variable = f"MOLORA_{name.upper()}"
    text = os.environ.get(variable)
    if text is None or isinstance(default, list | tuple | dict):
        return None
    try:
        if isinstance(default, bool):
            if text.lower() not in _YES | _NO:
                raise ValueError
            return text.lower() in _YES
        if isinstance(default, int | float):
            return type(default)(text)
    except ValueError as error:
        kind = "yes or no" if isinstance(default, bool) else "a number"
        raise InputError(
            f"{variable}={shorten(text, 40)} is not {kind}", f"correct or unset {variable}"
        ) from error
    return text or None


def merge(
    flags: Mapping[str, Any], recipe: Mapping[str, Any], defaults: Mapping[str, Any]
) -> dict[str, Setting]:
    """Every option of `defaults` with its value and source. A flag that is None or an empty list was not
    given.

    Raises InputError for an environment value of the wrong type.
    """
    merged: dict[str, Setting] = {}
    for name, default in defaults.items():
        flag = flags.get(name)
        if flag is not None and flag != [] and flag != ():
            merged[name] = Setting(flag, "flag")
            continue
        value = _from_environment(name, default)
        if value is not None:
            merged[name] = Setting(value, f"environment (MOLORA_{name.upper()})")
        elif recipe.get(name) is not None:
            merged[name] = Setting(recipe[name], "recipe")
        else:
            merged[name] = Setting(default, "default")
    return merged
