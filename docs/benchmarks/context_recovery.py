"""What a context router recovers of the adapters' gain, with 95 % intervals over documents.

    MOLORA_DATA=DATA python docs/benchmarks/context_recovery.py --base smollm2 --adapters ADAPTERS

DATA holds NAME.train.jsonl, NAME.val.jsonl and NAME.test.jsonl per adapter and mixed/SET.test.jsonl for the
sets two_turn, one_turn, unseen and pot, rows with `segments`; ADAPTERS one PEFT folder per NAME (or --bundle
BUNDLE). Trains on the train files only. NLLs that do not depend on the router (base, each adapter on every
token, uniform) are kept in --cache, so that a second run only runs the router.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from molora_cli.core import evaluate as ev
from molora_cli.core.adapter.factors import load_bundle_factors, load_factors
from molora_cli.core.adapter.read import read_adapter
from molora_cli.core.base.embedding import read_embedding
from molora_cli.core.base.model import load_base_model
from molora_cli.core.base.resolve import resolve_base
from molora_cli.core.base.structure import read_structure
from molora_cli.core.bundle.store import Bundle
from molora_cli.core.routed.model import RoutedModel
from molora_cli.core.router.files import load_tensors, save
from molora_cli.core.router.kinds import Surroundings
from molora_cli.core.router.spec import read_spec
from molora_cli.core.router.stack import RouterStack
from molora_cli.core.training.data import Example, read_examples
from molora_cli.core.training.mixing import labelled
from molora_cli.core.training.router_loop import train_context
from molora_cli.core.training.router_rows import RouterSettings, prepare
from molora_cli.refs import cache_dir, parse_ref

MIXED_SETS = ("two_turn", "one_turn", "unseen")
BLEND = "pot"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--adapters", type=Path, help="folder with one PEFT folder per adapter")
    where.add_argument("--bundle", type=Path)
    parser.add_argument("--base", default="smollm2")
    parser.add_argument("--split", choices=("val", "test"), default="test")
    parser.add_argument("--sets", nargs="*", default=["single", *MIXED_SETS, BLEND])
    parser.add_argument("--single", type=int, default=160, help="rows per domain of the single-domain set")
    parser.add_argument("--limit", type=int, help="rows per mixed set, evenly spaced; default all")
    parser.add_argument("--router", type=Path, help="a router file to evaluate (written where it is missing)")
    parser.add_argument(
        "--modes", nargs="*", default=["uniform", "1", "2", "soft"], help="uniform, top-k, soft"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--cache", type=Path, default=None)
    parser.add_argument("--json", type=Path, help="also write the results here")
    return parser.parse_args()


def spaced(rows: list[Example], limit: int | None) -> list[Example]:
    return rows if limit is None else rows[:: max(1, len(rows) // limit)][:limit]


def read_set(data: Path, name: str, args: argparse.Namespace, names: tuple[str, ...]) -> list[Example]:
    if name == "single":
        files = {n: read_examples(data / f"{n}.{args.split}.jsonl") for n in names}
        return [labelled(row, n) for n, rows in files.items() for row in rows[: args.single]]
    path = data / "mixed" / f"{name}.{args.split}.jsonl"
    return spaced(read_examples(path), args.limit) if path.is_file() else []


def parts(args: argparse.Namespace) -> tuple[Path, dict[str, Any], str]:
    """Base folder, factors by adapter, and a digest of both for the cache."""
    if args.bundle is not None:
        bundle = Bundle.open(args.bundle, args.base)
        entries = {name: bundle.entry(name) for name in bundle.adapters}
        factors = {name: load_bundle_factors(bundle.folder(name), entry) for name, entry in entries.items()}
        return bundle.base_path, factors, str([(n, e.sha256) for n, e in entries.items()])
    path = resolve_base(args.base).path
    base = read_structure(path)
    folders = sorted(p for p in args.adapters.iterdir() if (p / "adapter_config.json").is_file())
    adapters = {p.name: read_adapter(p.name, parse_ref(str(p.absolute())), base) for p in folders}
    factors = {name: load_factors(adapter) for name, adapter in adapters.items()}
    digest = str([(n, hashlib.sha256(a.weights.read_bytes()).hexdigest()) for n, a in adapters.items()])
    return path, factors, f"{path} {digest}"


def trained_router(
    args: argparse.Namespace, data: Path, tokenizer: Any, base: Path, names: tuple[str, ...]
) -> Path:
    """The router file: the one given, or a new one trained on the train files."""
    file: Path = args.router or cache_dir() / "recovery" / f"router-seed{args.seed}.safetensors"
    if args.router is not None and file.is_file():
        return file
    settings = RouterSettings(seed=args.seed)
    rows = prepare({n: read_examples(data / f"{n}.train.jsonl") for n in names}, tokenizer, settings)
    wall, cpu = time.monotonic(), time.process_time()
    made = train_context(rows, read_embedding(base), settings)
    print(
        f"router trained: {made.steps} steps, best {made.best_step}, {time.monotonic() - wall:.1f} s wall, "
        f"{time.process_time() - cpu:.1f} s of CPU",
        flush=True,
    )
    file.parent.mkdir(parents=True, exist_ok=True)
    save(file, made.spec, made.tensors)
    return file


class Cache:
    """Tallies on disk by what they depend on."""

    def __init__(self, folder: Path, key: str) -> None:
        self.folder, self.key = folder, key
        folder.mkdir(parents=True, exist_ok=True)

    def get(self, rows: list[ev.EvalRow], method: str, run: Callable[[], ev.Tally]) -> ev.Tally:
        found = hashlib.sha256(f"{self.key} {method}".encode())
        for row in rows:
            found.update(row.ids.numpy().tobytes() + row.labels.numpy().tobytes())
        path = self.folder / f"{found.hexdigest()[:24]}.npz"
        if path.is_file():
            with np.load(path, allow_pickle=False) as saved:
                return ev.Tally(saved["sums"], saved["counts"])
        tally = run()
        np.savez(path, sums=tally.sums, counts=tally.counts)
        return tally


def shown(interval: ev.Interval, scale: float = 100) -> str:
    return f"{interval.value * scale:.1f} [{interval.low * scale:.1f}, {interval.high * scale:.1f}]"


def progress(name: str, method: str) -> Callable[..., None]:
    began = time.monotonic()

    def tick(done: float, total: float | None = None, note: str = "") -> None:
        if sys.stderr.isatty():
            print(
                f"\r{name} {method}: {done}/{total}, {time.monotonic() - began:.0f} s ",
                end="",
                file=sys.stderr,
            )

    return tick


def main() -> None:
    args = arguments()
    data = Path(os.environ.get("MOLORA_DATA", ""))
    if not os.environ.get("MOLORA_DATA") or not data.is_dir():
        sys.exit("set MOLORA_DATA to the folder with the data sets")
    base, factors, digest = parts(args)
    names = tuple(factors)
    model_, tokenizer = load_base_model(base, dtype=args.dtype, device="cpu")
    file = trained_router(args, data, tokenizer, base, names)
    model = RoutedModel.from_parts(model_, factors, tokenizer=tokenizer)
    around = Surroundings(
        n_layers=model_.config.num_hidden_layers, embedding=model_.get_input_embeddings().weight
    )
    stack = RouterStack(read_spec(file), load_tensors(file), around, names)
    router_digest = hashlib.sha256(file.read_bytes()).hexdigest()
    cache = Cache(args.cache or cache_dir() / "recovery", f"1 {digest} {args.dtype}")
    results: dict[str, Any] = {}
    for name in args.sets:
        examples = read_set(data, name, args, names)
        if not examples:
            continue
        labels = names if name != BLEND else (*names, "+".join(sorted(("math", "code"), reverse=True)))
        rows = ev.evaluation_rows(tokenizer, examples, labels)

        def run(method: str, router: ev.Router, only: list[bool] | None = None) -> ev.Tally:
            tick = progress(name, method)  # noqa: B023 - called within the iteration
            return cache.get(
                rows,  # noqa: B023
                method,
                lambda: ev.evaluate(model, rows, router, len(labels), ticker=tick, only=only),  # noqa: B023
            )

        blended = name == BLEND
        tallies = [
            run(n, ev.constant([i], [1.0]), None if blended else ev.has_label(rows, i))
            for i, n in enumerate(names)
        ]
        methods = {"base": run("base", ev.base_only())}
        if blended:
            methods |= dict(zip(names, tallies, strict=True))
            pair = [names.index("math"), names.index("code")] if {"math", "code"} <= set(names) else []
            if pair:
                methods["half math, half code"] = run("half", ev.constant(pair, [0.5, 0.5]))
        model.router = stack if stack.live else None
        for mode in args.modes:
            if mode == "uniform":
                methods[mode] = run(mode, ev.uniform(len(names)))
                continue
            k = None if mode == "soft" else int(mode)
            methods[f"{stack.spec.kind} {mode if k is None else f'top-{k}'}"] = run(
                f"{router_digest} {mode}", ev.routed(stack, k)
            )
        print(f"\n{name}, {args.split}: {len(rows)} documents", flush=True)
        results[name] = report(methods, tallies, names, blended)
        if args.json:
            args.json.write_text(json.dumps(results, indent=1))


def report(
    methods: dict[str, ev.Tally], tallies: list[ev.Tally], names: tuple[str, ...], blended: bool
) -> dict[str, Any]:
    """Print one set's table and return it."""
    found: dict[str, Any] = {}
    if blended:
        for method, tally in methods.items():
            nll = ev.mean_nll(tally)
            print(f"  {method:22s} NLL {nll.value:.4f} [{nll.low:.4f}, {nll.high:.4f}]")
            found[method] = vars(nll)
        return found
    own = ev.own_tally(tallies)
    base = methods.pop("base")
    for title, tally in (("base", base), ("own adapter", own)):
        print(
            f"  {title:14s} NLL "
            + "  ".join(f"{n} {v:.3f}" for n, v in zip(names, tally.means(), strict=True))
        )
    for method, tally in methods.items():
        mean, by_domain = ev.recovered(base, tally, own)
        shares = "  ".join(f"{n} {v * 100:.1f}" for n, v in zip(names, by_domain, strict=True))
        print(f"  {method:18s} recovered {shown(mean)} %   {shares}", flush=True)
        found[method] = {**vars(mean), "domains": dict(zip(names, by_domain, strict=True))}
    return found


if __name__ == "__main__":
    main()
