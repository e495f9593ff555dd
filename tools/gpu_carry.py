"""Build what a GPU machine without network access needs besides the checkout: wheels, Triton cache, a small model.

usage: python tools/gpu_carry.py FOLDER [--model MODEL.gguf] [--cache triton-cache.tar.xz]

For Linux on x86-64, Python 3.12, Triton 3.6.0 and sm_90. The cache contains the kernels of all stages of
benchmarks/gpu.sh but trials, under the keys of Triton's Python 3.12 wheel. If python3.12 and its headers are
installed here, it also contains the kernel launchers, so that the GPU machine needs no C compiler. --cache: cache of
an earlier GPU run, whose entries are added. --model: for the part of `parity` that answers a question. The folder and
the checkout's tracked files may take 64 MiB together.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import pkgutil
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
LIMIT: Final = 64 << 20
PYTHON: Final = "3.12"
TRITON: Final = "3.6.0"
CAPABILITY: Final = 90
PLATFORMS: Final = ("manylinux2014_x86_64", "manylinux1_x86_64", *(f"manylinux_2_{n}_x86_64" for n in range(39, 4, -1)))
"""Platform tags of glibc 2.39 (Ubuntu 24.04); pip compares them literally, so older ones are listed, too."""
WHEELS: Final = (
    *("msgspec", "pydantic", "pydantic-core", "annotated-types", "typing-inspection", "typing-extensions", "pyzmq"),
    *("fastapi", "starlette", "anyio", "idna", "annotated-doc", "opentelemetry-api", "uvicorn", "click", "h11"),
    *("httptools", "jinja2", "markupsafe", "prometheus-client", "tqdm", "gguf", "llguidance"),
    "python-multipart",
)
"""Packages of the base install and of structured output; the locally installed versions are used."""
PRESENT: Final = ("numpy", "torch", "triton", "transformers", "tokenizers", "pyyaml", "requests")
"""Packages that the GPU machine has: torch, transformers and their dependencies."""
STAGES: Final = (
    *(
        "short",
        "second",
        "smoke",
        "decode",
        "prefill",
        "throughput",
        "serving",
        "invariance",
        "peers",
        "kernels",
        "mixers",
    ),
    "experts",
)
LAUNCHER, UTILS = "__triton_launcher", "cuda_utils"
SUFFIX: Final = ".cpython-312-x86_64-linux-gnu.so"
MACHINES: Final = ("x86_64,Linux,64bit,ELF", "x86_64,Linux,64bit,")
"""Triton's machine names in cache keys: with the program `file` installed, and without."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", type=Path, help="SmolLM2-135M-Instruct, a GGUF file, to be carried, too")
    parser.add_argument("--cache", type=Path, help="Triton cache of an earlier GPU run")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    store = args.folder.with_name(f"{args.folder.name}-store")
    store.mkdir(exist_ok=True)
    wheels(args.folder / "wheels")
    if args.model is None:
        (args.folder / "model.bin").unlink(missing_ok=True)
    else:
        pack_model(args.model, args.folder / "model.bin", store)
    contents = cache(args.folder / "triton-cache.tar.xz", store, args.cache, args.processes)
    commit = _output("git", "-C", str(ROOT), "rev-parse", "--short", "HEAD")
    (args.folder / "carry.json").write_text(json.dumps({"commit": commit, **contents}, indent=1) + "\n")
    sys.exit(check_size(args.folder))


def wheels(folder: Path) -> None:
    """Download the wheels for the GPU machine into an emptied folder. Exit if pip fails."""
    shutil.rmtree(folder, ignore_errors=True)
    platforms = [word for name in PLATFORMS for word in ("--platform", name)]
    command = [*_pip(folder), *platforms, *(f"{name}=={_installed(name)}" for name in WHEELS)]
    if (done := subprocess.run(command, capture_output=True, text=True)).returncode:
        sys.exit(f"error: pip cannot download the wheels: {done.stderr.strip().splitlines()[-1]}")
    for wheel in folder.glob("*.whl"):
        for needed in missing(wheel):
            sys.exit(f"error: {wheel.name} needs {needed}, which is not included; add it to WHEELS in {__file__}")


def missing(wheel: Path) -> Iterator[str]:
    """Yield the dependencies of a wheel that are neither included nor present on the GPU machine."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    known = {canonicalize_name(name) for name in (*WHEELS, *PRESENT)}
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        lines = archive.read(name).decode().partition("\n\n")[0].splitlines()
    environment = {"python_version": PYTHON, "python_full_version": f"{PYTHON}.3", "sys_platform": "linux", "extra": ""}
    for line in lines:
        if line.startswith("Requires-Dist: "):
            needed = Requirement(line.removeprefix("Requires-Dist: "))
            wanted = needed.marker is None or needed.marker.evaluate(environment)
            if wanted and canonicalize_name(needed.name) not in known:
                yield needed.name


def pack_model(source: Path, target: Path, store: Path) -> None:
    """Pack the small model if it or the packing code has changed."""
    from pagoda.benchmarks.gpu import small_model

    code = Path(small_model.__file__).read_bytes()
    stamp = hashlib.sha256(code + hashlib.sha256(source.read_bytes()).digest()).hexdigest()
    known = store / "model.stamp"
    if target.is_file() and known.is_file() and known.read_text() == stamp:
        return
    print("packing the model", flush=True)
    small_model.pack(source, target)
    check_answer(target, store / "model.gguf")
    known.write_text(stamp)


def check_answer(packed: Path, unpacked: Path) -> None:
    """Exit if the packed model, run by the reference backend, answers a test question wrongly."""
    import pagoda
    from pagoda.benchmarks.gpu import parity, small_model

    small_model.unpack(packed, unpacked)
    llm = pagoda.LLM(str(unpacked), backend="reference", dtype="float32", max_model_len=256, max_num_seqs=1)
    rules = pagoda.SamplingParams(temperature=0.0, max_tokens=24)
    text = llm.chat([{"role": "user", "content": parity.QUESTION}], rules, use_tqdm=False)[0].outputs[0].text
    llm.shutdown()
    if parity.ANSWER not in text:
        sys.exit(f"error: the small model answers {parity.QUESTION} with {text}; use finer quantization steps")


def cache(target: Path, store: Path, more: Path | None, processes: int) -> dict[str, object]:
    """Build and pack the Triton cache; return a summary of its contents."""
    key = triton_key(store)
    folder = store / hashlib.sha256(key.encode()).hexdigest()[:16]
    folder.mkdir(exist_ok=True)
    if more is not None:
        with tarfile.open(more) as archive:
            archive.extractall(folder, filter="data")
    sources = compile_kernels(folder, key, processes)
    headers = python_headers()
    if headers is not None:
        build_launchers(sources, headers, folder)
    entries = sorted(path for path in folder.iterdir() if path.is_dir())
    with tarfile.open(target, "w:xz", preset=9) as archive:
        for path in entries:
            archive.add(path, path.name)
    return {"triton": TRITON, "capability": CAPABILITY, "cache_entries": len(entries), "launchers": headers is not None}


def compile_kernels(folder: Path, key: str, processes: int) -> list[str]:
    """Compile the kernels of all stages in parallel; return the C sources of their launchers."""
    print("compiling kernels", flush=True)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(folder), "TRITON_STORE_BINARY_ONLY": "1"}
    command = [sys.executable, "-m", "pagoda.benchmarks.gpu.precompile", "--key", key, "--processes", str(processes)]
    with tempfile.TemporaryDirectory() as scratch:
        sources = Path(scratch, "launchers.json")
        if subprocess.run([*command, "--launchers", str(sources), *STAGES], env=environment).returncode:
            sys.exit("error: kernels do not compile, see above")
        launchers: list[str] = json.loads(sources.read_text())
        return launchers


def triton_key(store: Path) -> str:
    """Return the key of the GPU machine's Triton, like triton.runtime.cache.triton_key: version and file hashes.

    Wheels of one version differ in the compiled library only, so file names are taken from the Triton installed here.
    Exit if that is another version.
    """
    import triton

    if triton.__version__ != TRITON:
        sys.exit(f"error: the cache needs Triton {TRITON}; {triton.__version__} is installed")
    if (known := store / "triton-key").is_file():
        return known.read_text()
    print(f"reading Triton {TRITON} for Python {PYTHON}", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        command = [*_pip(Path(scratch)), *(word for name in PLATFORMS for word in ("--platform", name))]
        if (done := subprocess.run([*command, f"triton=={TRITON}"], capture_output=True, text=True)).returncode:
            sys.exit(f"error: pip cannot download Triton: {done.stderr.strip().splitlines()[-1]}")
        with zipfile.ZipFile(next(Path(scratch).glob("*.whl"))) as wheel:
            hashes = [
                hashlib.sha256(wheel.read(name)).hexdigest() for name in _hashed_files(Path(triton.__file__).parent)
            ]
    known.write_text(TRITON + "-".join(hashes))
    return known.read_text()


def _hashed_files(triton: Path) -> Iterator[str]:
    """Yield the wheel paths of the files that triton_key hashes, in its order."""
    yield "triton/runtime/cache.py"
    for part in ("compiler", "backends"):
        yield from _modules(triton, part)
    yield "triton/_C/libtriton.so"
    yield from _modules(triton, "language")


def _modules(triton: Path, part: str) -> Iterator[str]:
    for module in pkgutil.walk_packages([str(triton / part)], prefix=f"triton.{part}."):
        spec = module.module_finder.find_spec(module.name, None)
        assert spec is not None and spec.origin is not None  # noqa: PT018
        yield str(Path("triton") / Path(spec.origin).relative_to(triton))


def python_headers() -> Path | None:
    """Return the include folder of an installed Python of the GPU machine's version, or None."""
    candidates = [shutil.which(f"python{PYTHON}"), *Path.home().glob(f".pyenv/versions/{PYTHON}.*/bin/python{PYTHON}")]
    for python in filter(None, candidates):
        folder = _output(str(python), "-c", "import sysconfig; print(sysconfig.get_paths()['include'])")
        if folder and Path(folder, "Python.h").is_file():
            return Path(folder)
    return None


def build_launchers(sources: list[str], headers: Path, folder: Path) -> None:
    """Build the launchers as Triton does, under its cache keys."""
    import triton
    from triton.runtime.cache import _base32

    nvidia = Path(triton.__file__).parent / "backends" / "nvidia"
    libraries = [(UTILS, (nvidia / "driver.c").read_text()), *((LAUNCHER, source) for source in sources)]
    print(f"building {len(libraries)} launchers", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        libcuda = Path(scratch, "libcuda.so.1")
        _build(
            "int pagoda_none;", libcuda, "-Wl,-soname,libcuda.so.1"
        )  # stub; the real driver library is on the GPU machine
        for name, source in libraries:
            keys = [_base32(hashlib.sha256((source + machine).encode()).hexdigest()) for machine in MACHINES]
            targets = [folder / key / f"{name}{SUFFIX}" for key in keys]
            if all(target.is_file() for target in targets):
                continue
            built = Path(scratch, "built.so")
            include = f"-I{nvidia / 'include'}", f"-I{headers}"
            _build(source, built, *include, "-Wl,--no-as-needed", f"-L{scratch}", "-l:libcuda.so.1")
            for target in targets:
                target.parent.mkdir(exist_ok=True)
                shutil.copy(built, target)


def _build(source: str, target: Path, *flags: str) -> None:
    """Compile a shared library. Exit with the compiler's output on failure."""
    compiler = os.environ.get("CC", sysconfig.get_config_var("CC") or "cc").split()
    command = [*compiler, "-x", "c", "-", "-x", "none", "-O3", "-shared", "-fPIC", "-Wno-psabi", "-s", *flags]
    done = subprocess.run([*command, "-o", str(target)], input=source, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"error: a launcher cannot be built: {done.stderr[-2000:]}")


def check_size(folder: Path) -> int:
    """Print the sizes of the folder's contents and of the checkout; return 1 if they exceed the limit."""
    sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir()) if path.is_file()}
    sizes["wheels"] = sum(path.stat().st_size for path in (folder / "wheels").iterdir())
    tracked = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-z"], capture_output=True, check=True
    ).stdout.decode()
    sizes["checkout"] = sum(
        (ROOT / name).stat().st_size for name in tracked.split("\0") if name and (ROOT / name).is_file()
    )
    for name, size in sizes.items():
        print(f"{size / (1 << 20):6.1f} MiB  {name}")
    total = sum(sizes.values())
    print(f"{total / (1 << 20):6.1f} MiB of {LIMIT >> 20}: {folder}")
    if total > LIMIT:
        print("error: too large", file=sys.stderr)
    return int(total > LIMIT)


def _pip(folder: Path) -> list[str]:
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--only-binary=:all:",
        "--dest",
        str(folder),
    ]
    return [*command, "--python-version", PYTHON, "--implementation", "cp"]


def _installed(package: str) -> str:
    from importlib.metadata import version

    return version(package)


def _output(*command: str) -> str:
    """Return the output of a program; "" if it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


if __name__ == "__main__":
    main()
