"""Seconds that `make test` takes in a fresh clone of the last commit: environment, lint, types, tests.

usage: python fresh_clone.py [TARGET]     prints one JSON line; the clone is removed afterwards
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def main() -> None:
    target = sys.argv[1] if len(sys.argv) > 1 else "test"
    repository = Path(__file__).resolve().parents[1]
    ours = ("PYTHONPATH", "VIRTUAL_ENV", "MAKEFLAGS")
    plain = {name: value for name, value in os.environ.items() if name not in ours}
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["git", "clone", "-q", str(repository), f"{folder}/pagoda"], check=True)
        begin = time.perf_counter()
        done = subprocess.run(["make", target], cwd=f"{folder}/pagoda", env=plain, capture_output=True, text=True)
        seconds = time.perf_counter() - begin
    if done.returncode:
        print(done.stdout[-4000:], done.stderr[-2000:], file=sys.stderr)
    passed = re.findall(r"(\d+) passed", done.stdout)
    print(
        json.dumps(
            {
                "target": target,
                "seconds": round(seconds, 1),
                "passed": int(passed[-1]) if passed else 0,
                "status": done.returncode,
            }
        )
    )


if __name__ == "__main__":
    main()
