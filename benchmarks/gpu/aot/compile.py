"""Compile the kernels of torch_cuda ahead of time for any chip and report their resource usage.

    python -m pagoda.benchmarks.gpu.aot.compile [--chip sm_90] [--most 3] [folder ...]

prints one JSON line per kernel, specialisation and chip. The specialisations of a kernel are listed in the file of its
name in `launches`. TRITON_INTERPRET must not be set.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from pagoda.backends.torch_cuda.kernels.frame.launch import CHIPS, Chip
from pagoda.benchmarks.gpu.aot.launch import Launch

TARGETS: Final = tuple(CHIPS)
_LAUNCHES: Final = Path(__file__).with_name("launches")
FOLDERS: Final = tuple(
    sorted(".".join(path.relative_to(_LAUNCHES).with_suffix("").parts) for path in _LAUNCHES.glob("*/*.py"))
)
_WARP: Final = 32


def main(arguments: list[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="aot", description="Compile Triton kernels for any GPU, without one.")
    parser.add_argument("folders", nargs="*", default=FOLDERS, metavar="folder", help=", ".join(FOLDERS))
    parser.add_argument("--chip", action="append", choices=tuple(CHIPS), help="default: all")
    parser.add_argument("--most", type=int, help="specialisations of each folder, hot ones first; default: all")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    args: Any = parser.parse_args(arguments)
    for built in build_all(tuple(args.folders), tuple(args.chip or TARGETS), args.threads, args.most):
        print(json.dumps(asdict(built)), flush=True)
    return 0


def build_all(
    folders: tuple[str, ...], chips: tuple[str, ...], threads: int, most: int | None = None
) -> Iterator[CompiledKernel]:
    """Compile the specialisations of the folders for the chips. `most`: of each folder and chip, hot ones first."""
    jobs = [
        (f"{folder}/{name}", launch, CHIPS[chip])
        for folder in folders
        for chip in chips
        for name, launch in sorted(launches(folder, CHIPS[chip]).items(), key=lambda one: not one[1].hot)[:most]
    ]
    with ThreadPoolExecutor(threads) as pool:
        yield from pool.map(lambda job: build(*job), jobs)


def build(name: str, launch: Launch, chip: Chip) -> CompiledKernel:
    """Compile to machine code. Raise what Triton raises."""
    names = launch.kernel.arg_names
    types = {arg: launch.signature.get(arg, "constexpr").removesuffix(":16") for arg in names}
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, arg in enumerate(names)
        if launch.signature.get(arg, "").startswith("*") or launch.signature.get(arg, "").endswith(":16")
    }
    constants = {(names.index(arg),): value for arg, value in launch.constants.items()}
    source = ASTSource(launch.kernel, signature=types, constexprs=constants, attrs=aligned)
    options = {
        "num_warps": launch.num_warps,
        "num_stages": launch.num_stages,
        "enable_fp_fusion": launch.fused,
    }
    compiled = triton.compile(source, target=GPUTarget("cuda", chip.arch, _WARP), options=options)
    usage = _usage(compiled.asm["cubin"])
    return CompiledKernel(
        name=name,
        chip=chip.name,
        registers=usage["REG"],
        spilled=usage["STACK"] + usage["LOCAL"],  # ptxas reports spills as stack
        shared=compiled.metadata.shared,
        hot=launch.hot,
        wgmma="wgmma.mma_async" in compiled.asm["ptx"],
        wants_wgmma=launch.wgmma and chip.name == "sm_90",
    )


@dataclass(frozen=True, slots=True)
class CompiledKernel:
    """A compiled kernel and its resource usage."""

    name: str
    chip: str
    registers: int  # per thread
    spilled: int  # bytes per thread
    shared: int  # bytes per program
    hot: bool
    wgmma: bool
    wants_wgmma: bool


def launches(folder: str, chip: Chip) -> dict[str, Launch]:
    """Return a folder's specialisations for a chip, by name."""
    module = importlib.import_module(f"pagoda.benchmarks.gpu.aot.launches.{folder}")
    by_name: dict[str, Launch] = module.launches(chip)
    return by_name


def _usage(cubin: bytes) -> dict[str, int]:
    """Return REG, STACK, SHARED and LOCAL as reported by cuobjdump."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True)
    return {key: int(value) for key, value in re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", done.stdout)}


if __name__ == "__main__":
    sys.exit(main())
