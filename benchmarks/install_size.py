"""Megabytes on disk of the base install (no extras), pip itself not counted.

usage: python install_size.py [REPOSITORY]     prints one JSON line
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import venv
from pathlib import Path


def size(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def main() -> None:
    repository = sys.argv[1] if len(sys.argv) > 1 else str(Path(__file__).resolve().parents[1])
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        before = size(Path(folder))
        subprocess.run([f"{folder}/bin/pip", "install", "-q", "--no-compile", repository], check=True)
        print(json.dumps({"base_install_mb": round((size(Path(folder)) - before) / 1e6, 1)}))


if __name__ == "__main__":
    main()
