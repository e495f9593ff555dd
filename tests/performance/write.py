"""Measures and writes the tables of expected figures: all, or the kinds that are named. `make performance-table`."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def main(names: list[str]) -> None:
    sys.path.insert(0, str(Path(__file__).parents[1]))
    os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")  # as tests/conftest.py
    os.environ.setdefault("TRITON_INTERPRET", "1")
    from performance.expected import KINDS, write

    for name in names or KINDS:
        write(KINDS[name])
        print(KINDS[name].path)


if __name__ == "__main__":
    main(sys.argv[1:])
