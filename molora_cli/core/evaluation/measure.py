"""Every row of every table: planned first, looked up where it was measured before, the rest run in order."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from molora_cli.core.evaluation import baselines as bl
from molora_cli.core.evaluation import peft_models
from molora_cli.core.evaluation.baselines import Baseline
from molora_cli.core.evaluation.cost import Clock
from molora_cli.core.evaluation.derived import derive
from molora_cli.core.evaluation.lab import Lab
from molora_cli.core.evaluation.lines import BASE_ROW, Line, Measured, RouterFile
from molora_cli.core.evaluation.observed import Observed
from molora_cli.core.evaluation.score import Decide, PassCounter, constant, label_oracle, live, score
from molora_cli.core.evaluation.store import NllStore
from molora_cli.core.evaluation.ways import Way, usable_ways
from molora_cli.core.routed.route import BASE
from molora_cli.core.training.data import Example
from molora_cli.core.training.overlap import text_key
from molora_cli.errors import InputError
from molora_cli.out import Ticker, no_ticks


@dataclass
class _Work:
    line: Line
    measured: Measured
    key: str  # for the store; "" is not kept
    what: str  # the model it runs on; works on the same one follow one another
    model: Callable[[], Any]
    decide: Decide | None
    wanted: list[int]
    timed: str  # what it is timed as: works with the same name cost the same


class Measurement:
    """Plans and runs. train: rows per adapter for X-LoRA. timing: also take CPU times. notes: what could not
    be measured, and why; about: what was trained on the way."""

    def __init__(
        self,
        lab: Lab,
        sets: Sequence[Measured],
        store: NllStore,
        *,
        train: dict[str, list[Example]] | None = None,
        timing: bool = False,
    ) -> None:
        self.lab, self.sets, self.store = lab, list(sets), store
        self.train = train or {}
        self.timing = timing
        self.notes: list[str] = []
        self.about: dict[str, Any] = {}
        self._works: list[_Work] = []
        self._peft: tuple[str, Any] | None = None
        self._ticker: Ticker = no_ticks

    def run(
        self,
        baselines: Sequence[Baseline],
        routers: Sequence[RouterFile],
        modes: Sequence[str],
        *,
        ticker: Ticker = no_ticks,
    ) -> None:
        """Fill `lines` of every set. The ticker counts tokens of all forwards together."""
        self._ticker = ticker
        names = {b.name for b in baselines}
        whole = bool(names & set(bl.FROM_ADAPTERS))
        for measured in self.sets:
            self._plan_constants(measured, baselines, whole)
        for router in routers:
            self._plan_router(router, modes)
        for baseline in baselines:
            if baseline.name in bl.MERGES:
                self._plan_merge(baseline)
            elif baseline.name in bl.PEFT_MERGES:
                self._plan_peft_merge(baseline)
            elif baseline.name == bl.ARROW:
                for k in [baseline.settings["k"]] if baseline.settings["k"] else [1, 2]:
                    self._plan_arrow(replace(baseline, settings=baseline.settings | {"k": k}))
            elif baseline.name == bl.XLORA:
                self._plan_xlora(baseline)
        self._run_all()
        for measured in self.sets:
            derive(measured, names, self.lab.adapters)

    # -- planning -------------------------------------------------------------
    def _add(
        self,
        measured: Measured,
        title: str,
        group: str,
        key: str,
        what: str,
        model: Callable[[], Any],
        decide: Decide | None,
        *,
        only: list[int] | None = None,
        observe: bool = False,
        default: bool = False,
        caches: int = 1,
        passes: float = 1.0,
    ) -> None:
        observed = Observed(self.lab.adapters, len(measured.set.names)) if observe else None
        line = Line(title, group, measured.empty(), observed, passes, caches, default=default)
        measured.lines[title] = line
        wanted = list(range(len(measured.rows))) if only is None else only
        timed = group if group == "adapter" else title
        self._works.append(_Work(line, measured, key, what, model, decide, wanted, timed))

    def _plan_constants(self, measured: Measured, baselines: Sequence[Baseline], whole: bool) -> None:
        adapters = self.lab.adapters
        blended = measured.set.blended

        def add(title: str, group: str, key: str, decide: Decide, only: list[int] | None = None) -> None:
            self._add(measured, title, group, key, "adapters", self.lab.routed, decide, only=only)

        add(BASE_ROW, "base", "base", constant([BASE], [1.0]))
        for i, name in enumerate(adapters):
            # without the matrix an adapter is needed on its own domain alone
            only = None if whole or blended else [n for n, r in enumerate(measured.rows) if r.has(i)]
            add(name, "adapter", f"adapter {i}", constant([i], [1.0]), only)
        for baseline in baselines:
            if baseline.name == bl.ORACLE and not blended:
                add(bl.ORACLE, "oracle", "label oracle", label_oracle(len(adapters)))
            elif baseline.name == bl.UNIFORM:
                add(
                    bl.UNIFORM,
                    "baseline",
                    "uniform",
                    constant(range(len(adapters)), [1 / len(adapters)] * len(adapters)),
                )
            elif baseline.name in (bl.BLEND, bl.PAIRS):
                wanted = [baseline] if baseline.name == bl.BLEND else bl.pairs_of(adapters) if blended else []
                for blend in wanted:
                    at = [adapters.index(name) for name, _ in blend.shares]
                    shares = [share for _, share in blend.shares]
                    add(blend.title, "baseline", f"blend {at} {shares}", constant(at, shares))

    def _plan_router(self, router: RouterFile, modes: Sequence[str]) -> None:
        stack = router.stack = self.lab.router(router.path)
        usual = stack.k
        for way in usable_ways(stack, modes):

            def model(way: Way = way) -> Any:
                routed = self.lab.routed()
                stack.k, stack.temperature = way.k, way.temperature  # type: ignore[assignment]
                routed.router = stack
                routed.auto()
                return routed

            for measured in self.sets:
                self._add(
                    measured,
                    f"{router.title} {way.title}",
                    "router",
                    "",
                    "adapters",
                    model,
                    live,
                    observe=True,
                    default=way.temperature is None and way.k in (None, usual),
                    caches=2 if any(stage.first_pass for stage in stack.live) else 1,
                )

    def _plan_merge(self, baseline: Baseline) -> None:
        settings = baseline.settings
        for measured in self.sets:
            self._add(
                measured,
                baseline.title,
                "baseline",
                f"merge {baseline.name} {sorted(settings.items())}",
                baseline.title,
                lambda: self.lab.merged(baseline.name, settings),
                constant([0], [1.0]),
            )

    def _plan_peft_merge(self, baseline: Baseline) -> None:
        def build() -> Any:
            kind = baseline.name.removeprefix(bl.PEFT)
            return peft_models.merged(self.lab.base(), self.lab.adapter_folders(), kind, baseline.settings)

        key = f"{baseline.name} {sorted(baseline.settings.items())} peft {_peft_version()}"
        self._plan_peft(baseline.title, key, build)

    def _plan_arrow(self, baseline: Baseline) -> None:
        k, temperature = int(baseline.settings["k"]), baseline.settings["temperature"]

        def build() -> Any:
            return peft_models.arrow(self.lab.base(), self.lab.adapter_folders(), k, temperature)

        self._plan_peft(baseline.row, f"{baseline.row} peft {_peft_version()}", build)

    def _plan_xlora(self, baseline: Baseline) -> None:
        if len(self.train) < 2:
            raise InputError(
                "X-LoRA is trained first, and there are no training rows",
                "give --train NAME=FILE for each adapter, or leave xlora out of --baselines",
            )

        rows = hashlib.sha256("\0".join(text_key(r) for found in self.train.values() for r in found).encode())
        key = f"xlora {sorted(baseline.settings.items())} {rows.hexdigest()} peft {_peft_version()}"

        def build() -> Any:
            model, self.about[baseline.title] = peft_models.xlora(
                self.lab.base(),
                self.lab.adapter_folders(),
                self.train,
                self.lab.tokenizer,
                baseline.settings,
                kept=self.store.file(key),
                ticker=self._ticker,
            )
            return model

        # two passes, and PEFT keeps no keys and values: each token runs the whole text again
        self._plan_peft(baseline.title, key, build, passes=2.0, caches=0)

    def _plan_peft(
        self, title: str, key: str, build: Callable[[], Any], *, passes: float = 1.0, caches: int = 1
    ) -> None:
        def model() -> Any:
            if self._peft is None or self._peft[0] != title:
                self._peft = None
                self.lab.forget()
                self._peft = (title, build())
            return self._peft[1]

        for measured in self.sets:
            self._add(measured, title, "baseline", key, title, model, None, passes=passes, caches=caches)

    # -- running --------------------------------------------------------------
    def _run_all(self) -> None:
        todo = [(w, self.store.fill(w.key, w.measured.rows, w.line.tally, w.wanted)) for w in self._works]
        total = sum(len(work.measured.rows[i].ids) for work, missing in todo for i in missing)
        clock = Clock(self.lab.second_base(), self.sets[0].rows) if self.timing else None
        done = 0
        refused: set[str] = set()
        for work, missing in todo:
            if work.what not in refused:
                try:
                    if missing:
                        self._run(work, missing, done, total)
                    if clock is not None:
                        self._ticker(done, total, f"CPU time of {work.line.title}")
                        work.line.time = clock.ratio(work.timed, work.model, work.decide)
                except InputError as error:
                    if work.line.group != "baseline":
                        raise
                    refused.add(work.what)
                    self.notes.append(f"{work.line.title} was not measured: {error.message}")
            done += sum(len(work.measured.rows[i].ids) for i in missing)
        for work in self._works:
            if work.what in refused:
                work.measured.lines.pop(work.line.title, None)
        if self._peft is not None:  # PEFT has changed the base it was given
            self._peft = None
            self.lab.forget()

    def _run(self, work: _Work, missing: list[int], before: int, whole: int) -> None:
        """Measure the missing rows. before, whole: tokens that were done by then, and of the whole run."""
        model = work.model()
        said = f"{work.measured.set.name}: {work.line.title}"
        self._ticker(before, whole, said)

        def keep(at: Sequence[int]) -> None:
            self.store.put(work.key, work.measured.rows, work.line.tally, at)

        def tick(done: float, total: float | None = None, note: str = "") -> None:
            self._ticker(before + done, whole, said)

        if work.line.observed is None:
            score(model, work.measured.rows, missing, work.line.tally, work.decide, ticker=tick, done=keep)
            return
        with PassCounter(model.base, model.engine.context.n_layers) as counter:
            score(
                model,
                work.measured.rows,
                missing,
                work.line.tally,
                work.decide,
                observed=work.line.observed,
                ticker=tick,
                done=keep,
                counter=counter,
            )
        work.line.passes = counter.passes()


def _peft_version() -> str:
    import peft

    return str(peft.__version__)
