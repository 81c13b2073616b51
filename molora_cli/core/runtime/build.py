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

from molora_kernels import builders, cpu_build

from molora_cli.core.runtime.package import PackageError, PassingError, heard, write_failure

_LITERALS = 4096  # elements of tensors that the model's own code makes; more would not be told as text


def build(document: Mapping[str, Any], path: Path) -> None:
    """Compile the step of this shape into `path`. It is there whole or not.

    Raises PackageError where the model cannot be exported, PassingError where anything else is the reason.
    """
    place = _place(path)
    shutil.rmtree(place, ignore_errors=True)
    try:
        place.mkdir(parents=True)
        program, about = _export(document)
        try:
            _compile(program, about, place / "model.pt2")
        except Exception as error:  # lowering and the compiler raise what they like
            raise PassingError(_line(error)) from error
        builders.publish(place / "model.pt2", path)
    except PackageError:
        raise
    except (OSError, MemoryError, cpu_build.BuildError) as error:
        raise PassingError(_line(error)) from error
    except Exception as error:  # and so does tracing
        raise PackageError(_line(error)) from error
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {(lines or [''])[0][:300]}"


def _place(path: Path) -> Path:
    """Where this process works; `builders.sweep` removes it where the process is killed."""
    return path.parent / f".{path.stem}-{os.getpid()}"


def _export(document: Mapping[str, Any]) -> tuple[Any, str]:
    """The exported program and what the package is to say of its constants."""
    import torch
    from molora_kernels import cpu_ops

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
    return program, json.dumps({"sizes": sizes, "literals": literals})


def _compile(program: Any, about: str, made: Path) -> None:
    from torch._inductor import aoti_compile_and_package

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
    """The process that `package.start` begins, which holds the lock."""
    order, path = Path(sys.argv[1]), Path(sys.argv[2])
    # what the compiler keeps between runs is of no use to anyone, and goes with the folder
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(_place(path) / "inductor")
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    tempfile.tempdir = str(_place(path))
    try:
        try:
            build(json.loads(order.read_text(encoding="utf-8")), path)
            path.with_suffix(".failed").unlink(missing_ok=True)
        except PackageError as error:
            write_failure(path, error)
        heard(path)
    finally:
        builders.lock_path(path).unlink(missing_ok=True)


if __name__ == "__main__":
    main()
