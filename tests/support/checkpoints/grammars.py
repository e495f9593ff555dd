"""A small vocabulary with tokens of several characters, grammars over it, and what a mask holds."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from pagoda.common.engine.messages import EngineRequest
from pagoda.common.engine.sampling.rules import SamplingRules
from pagoda.common.engine.structured_output.compiler import Structured
from pagoda.common.engine.structured_output.grammar import Grammar, Thinking, Vocabulary
from pagoda.common.engine.structured_output.guidance import guidance_text
from pagoda.common.engine.structured_output.token_mask import TokenMaskState, refresh_masks
from pagoda.common.sampling_params import StructuredOutputsParams

PIECES = ["".join(letters) for size in (1, 2, 3) for letters in itertools.product("ab,", repeat=size)]
SINGLES = [chr(code) for code in range(32, 127) if chr(code) not in "ab,"] + ["\n", "é"]
TEXTS = [*PIECES, *SINGLES, '":', '", "', "ab1", "}\n"]
EOS = len(TEXTS)
THINK, END_THINK, PAD = EOS + 1, EOS + 2, EOS + 3
SIZE = EOS + 7
"""Three ids more than there are tokens, as models are padded."""
SPECIAL = {"<eos>": EOS, "<think>": THINK, "</think>": END_THINK}


def vocabulary() -> Vocabulary:
    tokens = [*(text.encode() for text in TEXTS), b"<eos>", b"<think>", b"</think>"]
    return Vocabulary((*tokens, *[b""] * (SIZE - len(tokens))), frozenset({EOS, THINK, END_THINK}), (EOS,), spell)


def spell(text: str) -> list[int]:
    """Token ids of a text, the longest first."""
    found, at = [], 0
    while at < len(text):
        size = next(size for size in (3, 2, 1) if text[at : at + size] in TEXTS)
        found.append(TEXTS.index(text[at : at + size]))
        at += size
    return found


def text_of(tokens: Sequence[int]) -> str:
    return "".join(TEXTS[token] for token in tokens if token < EOS)


def grammar(**asked: object) -> Grammar:
    return Grammar(guidance_text(StructuredOutputsParams(**asked), SPECIAL))


def asking(
    held: Grammar | None = None,
    thinking: Thinking | None = None,
    name: str = "r",
    max_tokens: int = 30,
    **rules: object,
) -> EngineRequest:
    return EngineRequest(
        request_id=name,
        prompt_token_ids=[1, 2, 3],
        rules=SamplingRules(**rules),
        max_tokens=max_tokens,
        stop_token_ids=frozenset({EOS}),
        eos_token_ids=frozenset({EOS}),
        grammar=held,
        thinking=thinking,
    )


class Answer:
    """A mask state and the tokens that it accepted."""

    def __init__(self, request: EngineRequest, made: Structured) -> None:
        self.mask_state: TokenMaskState = made.mask_state(request)
        self.outputs: list[int] = []

    @property
    def allowed(self) -> set[int]:
        """What may come next."""
        return set(range(SIZE)) if self.mask_state.bits is None else set_of(self.mask_state.bits)

    def go(self, *tokens: int) -> Answer:
        for token in tokens:
            assert token in self.allowed, token
            self.mask_state.accept(token)
            self.outputs.append(token)
            if not self.mask_state.finished:
                refresh_masks([(self.mask_state, self.outputs)])
        return self


def set_of(bits: np.ndarray) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little", count=SIZE)).tolist())
