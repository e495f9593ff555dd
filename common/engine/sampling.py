"""How a token is chosen: the rules of one request, and the one definition of sampling noise.

Knows token ids only, no text. Every backend implements the same order: logits -> repetition, frequency and
presence penalties -> logit_bias -> masks (allowed ids, bad words, min_tokens) -> logits processors -> temperature
-> top-k -> top-p -> min-p -> argmax(logits + gumbel). LogprobsMode says at which end of it logprobs are taken.

The noise is counter-based: a 32-bit hash of (seed, position, token id). The same integers come out in numpy,
torch, Triton and JAX, whatever the batch: two runs with one seed differ only where their logits do. In float32 that
changes no token in practice; in bfloat16 the rounding of a batch tips near-ties. Greedy rows draw none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol

import numpy as np
import numpy.typing as npt

LogprobsMode = Literal["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"]
"""What logprobs hold. raw: as the model gave them. processed: as the token was drawn from them, that is after all
rules; tokens that cannot be drawn have minus infinity. A greedy row has no temperature and no filters. Prompt tokens
were not drawn, so that both show theirs raw."""

GREEDY_EPSILON: Final = 1e-5
"""Temperatures below this are greedy."""


@dataclass(frozen=True, slots=True)
class SamplingRules:
    """One request's sampling, resolved: ids instead of words, a concrete seed, nothing optional but logprobs.

    `top_k` 0 keeps all. `stop_ids`: tokens masked out while fewer than `min_tokens` were generated.
    `logprobs` / `prompt_logprobs`: how many best tokens to report (0: only the chosen one, -1: all); None: no report.
    `logprob_token_ids`: report these instead of the best, out of `logprobs` -1.
    `extra_args`: what the request says to logits processors; the engine itself reads nothing in it.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    min_tokens: int = 0
    stop_ids: tuple[int, ...] = ()
    seed: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: tuple[int, ...] = ()
    extra_args: Mapping[str, Any] | None = None

    @property
    def is_greedy(self) -> bool:
        """True when the best token wins without noise."""
        return self.temperature < GREEDY_EPSILON

    @property
    def has_penalties(self) -> bool:
        """True when the history of the request changes its logits."""
        return bool(self.presence_penalty or self.frequency_penalty) or self.repetition_penalty != 1.0

    @property
    def reads_history(self) -> bool:
        """True when earlier tokens change the logits: penalties, or banned words of several tokens."""
        return self.has_penalties or any(len(word) > 1 for word in self.bad_words)


class LogitsProcessor(Protocol):
    """Code of the operator's that edits logits. One object serves all requests, so it keeps no state of any.

    The backend's warm-up calls it too, on a made-up prompt. What it raises ends the engine.
    """

    def apply(
        self,
        logits: npt.NDArray[np.float32],
        token_ids: Sequence[int],
        num_prompt: int,
        extra_args: Mapping[str, Any],
    ) -> None:
        """Edit the logits [V] of one sequence's next token in place; minus infinity forbids a token.

        `token_ids`: every token so far, the first `num_prompt` of them prompt, where 2147483647 is no token but stands
        for an embedding. `extra_args`: the request's own.
        """
        ...


@dataclass(frozen=True, slots=True)
class SamplerOptions:
    """What holds for all requests of an engine. `processors` run in order."""

    logprobs_mode: LogprobsMode = "raw_logprobs"
    processors: tuple[LogitsProcessor, ...] = ()


USUAL: Final = SamplerOptions()


U32 = npt.NDArray[np.uint32]

# Multipliers of the "lowbias32" finaliser (C. Wellons, hash-prospector): low bias at two multiplications.
MIX_1: Final = 0x7FEB352D
MIX_2: Final = 0x846CA68B
TOKEN_STRIDE: Final = 0x9E3779B9


def mix(x: U32) -> U32:
    """lowbias32 of uint32 values, element by element."""
    x = x ^ (x >> np.uint32(16))
    x = x * np.uint32(MIX_1)
    x = x ^ (x >> np.uint32(15))
    x = x * np.uint32(MIX_2)
    return x ^ (x >> np.uint32(16))


def noise_keys(seeds: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]) -> U32:
    """uint32 [S]: the hash of (seed, position) that each row's token noise starts from.

    `seeds` int64 [S]; `positions` int64 [S], the position of the token to be chosen.
    """
    wide = seeds.astype(np.uint64)
    low = (wide & np.uint64(0xFFFFFFFF)).astype(np.uint32)
    high = (wide >> np.uint64(32)).astype(np.uint32)
    return mix(mix(mix(low) ^ high) + positions.astype(np.uint32))


def gumbel(keys: U32, token_ids: U32) -> npt.NDArray[np.float32]:
    """float32 [S, n]: Gumbel noise of the given tokens. `keys` uint32 [S], `token_ids` uint32 [S, n] or [n]."""
    bits = mix(keys[:, None] ^ (token_ids * np.uint32(TOKEN_STRIDE)))
    # 23 bits and a half fit float32, so that the result is never 1, whose noise would be infinite.
    uniform = ((bits >> np.uint32(9)).astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-23)
    noise: npt.NDArray[np.float32] = -np.log(-np.log(uniform))
    return noise
