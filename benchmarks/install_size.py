"""Megabytes on disk of the base install (no extras) with the bytecode that pip writes, pip itself not counted.

usage: python install_size.py [REPOSITORY]     prints one JSON line
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path


def size(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def main() -> None:
    repository = sys.argv[1] if len(sys.argv) > 1 else str(Path(__file__).resolve().parents[1])
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "install", "-q", "--target", folder, repository]
        subprocess.run(pip, check=True)
        compiled = sum(path.stat().st_blocks * 512 for path in Path(folder).rglob("*.pyc"))
        whole = size(Path(folder))
        print(json.dumps({"base_install_mb": round(whole / 1e6, 1), "of_which_bytecode_mb": round(compiled / 1e6, 1)}))


if __name__ == "__main__":
    main()
