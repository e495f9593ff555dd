"""Compile kernels for chips that are not here, and read from the machine code what they take.

    python -m pagoda.backends.torch_cuda.kernels.aot [--chip sm_90] [folder ...]

prints one JSON line for each kernel, specialisation and chip. Must run where TRITON_INTERPRET is not set.
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

from pagoda.backends.torch_cuda.kernels.launch import CHIPS, Chip, Launch

TARGETS: Final = ("sm_80", "sm_90", "sm_100")
FOLDERS: Final = tuple(sorted(path.parent.name for path in Path(__file__).parent.glob("*/arg_specs.py")))
_WARP: Final = 32


@dataclass(frozen=True, slots=True)
class Built:
    """A compiled kernel. `registers` of a thread; `spilled` bytes of a thread; `shared` bytes of a program."""

    name: str
    chip: str
    registers: int
    spilled: int
    shared: int
    hot: bool
    wgmma: bool
    wants_wgmma: bool


def launches(folder: str, chip: Chip) -> dict[str, Launch]:
    """What a kernel's folder wants compiled for a chip, by name."""
    module = importlib.import_module(f"pagoda.backends.torch_cuda.kernels.{folder}.arg_specs")
    found: dict[str, Launch] = module.launches(chip)
    return found


def build(name: str, launch: Launch, chip: Chip) -> Built:
    """Compile to machine code. Raises what Triton raises."""
    names = launch.kernel.arg_names
    types = {arg: launch.signature.get(arg, "constexpr").removesuffix(":16") for arg in names}
    aligned = {
        (at,): [["tt.divisibility", 16]]
        for at, arg in enumerate(names)
        if launch.signature.get(arg, "").startswith("*") or launch.signature.get(arg, "").endswith(":16")
    }
    constants = {(names.index(arg),): value for arg, value in launch.constants.items()}
    source = ASTSource(launch.kernel, signature=types, constexprs=constants, attrs=aligned)
    options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", chip.arch, _WARP), options=options)
    usage = _usage(compiled.asm["cubin"])
    return Built(
        name=name,
        chip=chip.name,
        registers=usage["REG"],
        spilled=usage["STACK"] + usage["LOCAL"],  # ptxas counts what it spills as stack
        shared=compiled.metadata.shared,
        hot=launch.hot,
        wgmma="wgmma.mma_async" in compiled.asm["ptx"],
        wants_wgmma=launch.wgmma and chip.name == "sm_90",
    )


def _usage(cubin: bytes) -> dict[str, int]:
    """REG, STACK, SHARED, LOCAL as the toolkit's own reader finds them."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True)
    return {key: int(value) for key, value in re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", done.stdout)}


def build_all(folders: tuple[str, ...], chips: tuple[str, ...], threads: int) -> Iterator[Built]:
    """Every specialisation of the folders on the chips."""
    wanted = [
        (f"{folder}/{name}", launch, CHIPS[chip])
        for folder in folders
        for chip in chips
        for name, launch in launches(folder, CHIPS[chip]).items()
    ]
    with ThreadPoolExecutor(threads) as pool:
        yield from pool.map(lambda job: build(*job), wanted)


def main(arguments: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="aot", description="Compile Triton kernels for GPUs that are not here.")
    parser.add_argument("folders", nargs="*", default=FOLDERS, metavar="folder", help=", ".join(FOLDERS))
    parser.add_argument("--chip", action="append", choices=tuple(CHIPS), help="default: sm_80, sm_90 and sm_100")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    asked: Any = parser.parse_args(arguments)
    for built in build_all(tuple(asked.folders), tuple(asked.chip or TARGETS), asked.threads):
        print(json.dumps(asdict(built)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
