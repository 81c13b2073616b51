"""Tasks of lm-evaluation-harness on the routed model. The harness is an extra: pip install 'molora[eval]'."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from molora_cli.core.evaluation.lab import Lab
from molora_cli.core.evaluation.lines import RouterFile
from molora_cli.errors import InputError
from molora_cli.refs import offline
from molora_cli.text import shorten


def check_harness() -> None:
    """Raises InputError where the harness is not installed."""
    try:
        import lm_eval  # noqa: F401
    except ImportError as error:
        raise InputError(
            "--lm-eval needs lm-evaluation-harness, which is not installed", "pip install 'molora[eval]'"
        ) from error


def run_harness(
    lab: Lab, routers: Sequence[RouterFile], tasks: Sequence[str], *, limit: int | None, seed: int
) -> dict[str, Any]:
    """Model -> task -> metric -> value, for the base and every router with the k of its file.

    tasks: names that the harness knows, or paths of task files (.yaml). Their data comes from where the task
    says: a task file with local data needs no network. Raises InputError for a task that cannot be loaded.
    """
    check_harness()
    if offline():  # the data sets library reads this once, when it is first imported
        os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    names, folders = _split(tasks)
    try:
        manager = TaskManager(include_path=folders or None)
    except Exception as error:  # whatever a task file makes the harness raise
        raise _refused(tasks, error) from error
    missing = [n for n in names if n not in manager.all_tasks]
    if missing:
        raise InputError(
            f"lm-evaluation-harness has no task '{shorten(missing[0], 60)}'",
            "list them with: lm_eval ls tasks; or give the path of a task file",
        )
    model = lab.routed()
    wrapped = wrap(model)
    document: dict[str, Any] = {}
    stacks = {"base": None, **{r.title: lab.router(r.path) for r in routers}}
    for title, stack in stacks.items():
        model.router = stack
        if stack is None:
            model.off()
        else:
            model.auto()
        try:
            found = simple_evaluate(
                model=wrapped,
                tasks=names,
                task_manager=manager,
                limit=limit,
                bootstrap_iters=1000,
                log_samples=False,
                random_seed=seed,
                numpy_random_seed=seed,
                torch_random_seed=seed,
                fewshot_random_seed=seed,
                verbosity="ERROR",
            )
        except (OSError, ValueError, KeyError, ConnectionError) as error:
            raise _refused(tasks, error) from error
        document[title] = {
            task: {k: v for k, v in values.items() if isinstance(v, int | float) and not isinstance(v, bool)}
            for task, values in (found or {"results": {}})["results"].items()
        }
    return document


def wrap(model: Any, batch_size: int = 8) -> Any:
    """A routed model as the harness sees it: its own HFLM around the base, whose forward and `generate` are
    routed already. Prompts are padded on the right for likelihoods and on the left for generation; padding
    takes no part in a route."""
    from lm_eval.models.huggingface import HFLM

    class RoutedLM(HFLM):  # type: ignore[misc]
        """HFLM with a routed model in it."""

        @property
        def tokenizer_name(self) -> str:
            # a name with a path would be part of the harness's record
            return "molora"

    return RoutedLM(
        pretrained=model.base,
        tokenizer=model.tokenizer,
        backend="causal",
        batch_size=batch_size,
        device=str(model.device),
    )


def _split(tasks: Sequence[str]) -> tuple[list[str], list[str]]:
    """Task names, and the folders of those that were given as files."""
    names, folders = [], []
    for task in tasks:
        path = Path(task).expanduser()
        if path.suffix in (".yaml", ".yml"):
            names.append(_task_name(path))
            folders.append(str(path.absolute().parent))
        else:
            names.append(task)
    return names, list(dict.fromkeys(folders))


def _task_name(path: Path) -> str:
    """The `task:` of a task file. Its other tags (!function) are the harness's own business."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{shorten(str(path))} cannot be read", "give the path of a task file") from error
    for line in lines:
        key, sep, value = line.partition(":")
        if sep and key.strip() == "task" and key == key.lstrip() and value.strip():
            return value.strip().strip("\"'")
    raise InputError(f"{shorten(str(path))} names no task", "a task file has a line 'task: NAME'")


def _refused(tasks: Sequence[str], error: Exception) -> InputError:
    return InputError(
        f"lm-evaluation-harness cannot run {shorten(', '.join(tasks), 60)}: {shorten(str(error), 160)}",
        "check the task file; a task whose data is not on this machine needs the network",
    )
