"""A model that plays written answers, for tests of the loop of an agent: what it says depends on what its prompt holds.

Its name is "fake:script@FILE". FILE is JSON of a Script. The model plays the last turn whose needs are all in its
prompt, and LOST if there is none, so that a client sees a call only if the model was shown the tool, and an answer only
if it was shown the result.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
from support.checkpoints.byte_text import EOS

LOST = "I was not shown what I need."


class Turn(msgspec.Struct, frozen=True):
    """What the model says if its prompt holds all of `needs`."""

    needs: list[str]
    says: str


class Script(msgspec.Struct, frozen=True):
    """`openings`: what the chat template opens an answer with; the last one in a text is where the answer begins."""

    openings: list[str]
    turns: list[Turn]

    def write(self, file: Path) -> str:
        """Write the script and return the name of the model that plays it."""
        file.write_bytes(msgspec.json.encode(self))
        return f"fake:script@{file}"

    def answer(self, prompt: str) -> str:
        """Return what the model says after a prompt."""
        fitting = [turn.says for turn in self.turns if all(need in prompt for need in turn.needs)]
        return fitting[-1] if fitting else LOST


def scripted(file: Path) -> Callable[[list[int]], int]:
    """Return the function from a sequence's bytes to the next byte of its answer."""
    script = msgspec.json.decode(file.read_bytes(), type=Script)
    openings = [opening.encode() for opening in script.openings]

    def next_token(history: list[int]) -> int:
        if history[-1] == EOS:  # a step planned ahead, whose token nobody reads
            return EOS
        text = bytes(token for token in history if token != EOS)
        begin = max((text.rfind(opening) + len(opening) for opening in openings if opening in text), default=None)
        if begin is None:  # a chunk of a prompt, or a prompt of another template
            return EOS
        answer = script.answer(text[:begin].decode(errors="replace")).encode()
        said = len(text) - begin
        return answer[said] if said < len(answer) else EOS

    return next_token
