"""pagoda under the name `vllm`, so that programs which import vLLM run unchanged.

    python -m pagoda.as_vllm script.py ...      (or -m module ..., -c code, or the name of an installed command)

The folder of this file holds a package `vllm` and its metadata. It becomes the first entry of PYTHONPATH and sys.path:
child processes find the package, too, and `importlib.metadata.version("vllm")` answers.
"""

from __future__ import annotations

import importlib
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

FOLDER: Final = Path(__file__).resolve().parent

_USAGE: Final = (
    "usage: python -m pagoda.as_vllm (SCRIPT | -m MODULE | -c CODE | COMMAND) [arguments]\n"
    "Run a Python program for which `import vllm` imports pagoda. COMMAND: an installed one, such as lm_eval."
)


def install() -> None:
    """Let `import vllm` import pagoda, in this process and in its child processes. Idempotent.

    Raises ImportError if vLLM itself was imported before.
    """
    loaded = sys.modules.get("vllm")
    if loaded is not None and getattr(loaded, "__file__", None) != str(FOLDER / "vllm" / "__init__.py"):
        raise ImportError("vLLM itself was imported before; call pagoda.as_vllm.install() first")
    folder = str(FOLDER)
    if folder not in sys.path:
        sys.path.insert(0, folder)
        importlib.invalidate_caches()
    os.environ["PYTHONPATH"] = _with_folder(os.environ.get("PYTHONPATH", ""))


def main(argv: Sequence[str] | None = None) -> int:
    """Replace this process by a Python that runs the program of the arguments. Return 2 without one."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help"):
        print(_USAGE, file=sys.stdout if words else sys.stderr)
        return 0 if words else 2
    if not words[0].startswith("-") and not Path(words[0]).exists():
        command = shutil.which(words[0])
        if command is None:
            print(f"python -m pagoda.as_vllm: there is no script and no command {words[0]!r}", file=sys.stderr)
            return 2
        words[0] = command
    os.environ["PYTHONPATH"] = _with_folder(os.environ.get("PYTHONPATH", ""))
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, *words])


def _with_folder(path: str) -> str:
    """Return a value of PYTHONPATH with FOLDER at its beginning."""
    others = [entry for entry in path.split(os.pathsep) if entry and entry != str(FOLDER)]
    return os.pathsep.join((str(FOLDER), *others))
