"""Makes one package: `python -m molora_cli.core.runtime.build SHAPE.json STEP.pt2`. See `package.start`."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from molora_cli.core.runtime.package import PackageError

_LITERALS = 4096  # elements of tensors that the model's own code makes; more would not be told as text


def build(document: Mapping[str, Any], path: Path) -> None:
    """Compile the step of this shape into `path`. Raises PackageError; it is there whole or not."""
    place = _place(path)
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    try:
        _compile(document, place / "model.pt2")
        (place / "model.pt2").replace(path)
    except PackageError:
        raise
    except Exception as error:  # tracing, lowering and the compiler raise what they like
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise PackageError(f"{type(error).__name__}: {(lines or [''])[0][:300]}") from error
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _place(path: Path) -> Path:
    """Where this process works; `package.is_building` looks for it."""
    return path.parent / f".{path.stem}-{os.getpid()}"


def _compile(document: Mapping[str, Any], made: Path) -> None:
    import torch
    from molora_kernels import cpu_ops
    from torch._inductor import aoti_compile_and_package

    from molora_cli.core.runtime.step import TABLES, Shape, export_step

    torch.set_num_threads(1)
    cpu_ops.load()
    program = export_step(Shape.read(document))
    own = {**dict(program.state_dict), **program.constants}
    # tensors that the model's own code makes, in no module
    named = {*dict(program.state_dict), *program.graph_signature.non_persistent_buffers}
    literals = {name: _literal(name, own[name]) for name in own if name not in named}
    sizes = {
        name: [list(tensor.shape), str(tensor.dtype)]
        for name, tensor in own.items()
        if name in named and isinstance(tensor, torch.Tensor) and not name.endswith(TABLES)
    }
    about = json.dumps({"sizes": sizes, "literals": literals})
    aoti_compile_and_package(
        program,
        package_path=str(made),
        inductor_configs={
            "aot_inductor.package_constants_in_so": False,
            "aot_inductor.metadata": {"molora": about},
            "aot_inductor.precompile_headers": False,
            # the values here are none: nothing may be taken from them
            "joint_graph_constant_folding": False,
            "always_keep_tensor_constants": True,
            "cpp.dynamic_threads": True,
        },
    )


def _literal(name: str, tensor: Any) -> list[Any]:
    if tensor.numel() > _LITERALS:
        raise PackageError(f"the model makes a tensor of {tensor.numel()} elements by itself ({name})")
    return [list(tensor.shape), str(tensor.dtype), tensor.flatten().tolist()]


def main() -> None:
    order, path = Path(sys.argv[1]), Path(sys.argv[2])
    # what the compiler keeps between runs is of no use to anyone, and goes with the folder
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(_place(path) / "inductor")
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    tempfile.tempdir = str(_place(path))
    document = json.loads(order.read_text(encoding="utf-8"))
    try:
        build(document, path)
    except PackageError as error:
        path.with_suffix(".failed").write_text(f"{error}\n", encoding="utf-8")
    finally:
        order.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
