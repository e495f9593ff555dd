"""What engines that answer at once say, so that two of them say the same: plain words by position. Needs nothing.

They may be told to take their time, so that a server's cost of each event can be seen where it keeps up. Each word is
one token of the model's tokenizer with a blank before it, so that each is text by itself.
"""

from __future__ import annotations

import json
import mmap
import os
import re
import struct
import time
from pathlib import Path

WORDS = 997
"""A prime, so that no length of prompt repeats it in step."""

_WORD = re.compile("Ġ[a-z]{3,9}")  # how byte-level tokenizers write a blank


def tokens(folder: str) -> list[int]:
    """Token ids of a Hugging Face folder: what stands at position p of any sequence is number p modulo their count."""
    vocabulary = json.loads((Path(folder) / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
    words = sorted(number for text, number in vocabulary.items() if _WORD.fullmatch(text))
    return words[:: len(words) // WORDS][:WORDS]


class Pace:
    """How long a step takes at least, in seconds: what the file that INSTANT_PACE names says at the moment."""

    def __init__(self) -> None:
        with open(os.environ["INSTANT_PACE"], "rb") as file:
            self._seconds = mmap.mmap(file.fileno(), 8, prot=mmap.PROT_READ)
        self._last = 0.0

    def wait(self) -> None:
        """Sleep until the next step may end."""
        (seconds,) = struct.unpack("d", self._seconds)
        if seconds:
            time.sleep(max(0.0, self._last + seconds - time.monotonic()))
            self._last = time.monotonic()


def set_pace(path: Path, seconds: float) -> None:
    """Write such a file, in place."""
    with open(path, "r+b" if path.exists() else "wb") as file:
        file.write(struct.pack("d", seconds))
