"""No model's name outside common/models (and the readers that translate checkpoint formats)."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NAMES = re.compile(r"\b(qwen\d?|gemma\d?|mixtral|mistral|olmo\d?|phi3|gpt2|opt_|smollm2?)\b", re.IGNORECASE)
ALLOWED = (
    "common/models/",
    "common/weights/gguf",
    "common/text/gguf",
    "common/config/groups/model.py",
    "common/config/groups/model.py",
    "server/parsers/",
)


def test_models_are_named_in_one_place() -> None:
    found = []
    for top in ("common", "backends", "server"):
        for path in (ROOT / top).rglob("*.py"):
            name = str(path.relative_to(ROOT))
            if name.startswith(ALLOWED):
                continue
            found += [
                f"{name}:{n}: {line.strip()}"
                for n, line in enumerate(path.read_text().splitlines(), 1)
                if NAMES.search(line)
            ]
    assert not found, "\n".join(found)
