"""Sampling rules of one request, and the definition of sampling noise. Token ids only, no text.

Every backend implements the same order, which is vLLM's: logits -> logit_bias and masks (grammar, allowed ids, bad
words, min_tokens) -> logits processors that may change which token is the best -> repetition, frequency and presence
penalties -> temperature -> logits processors that do not, min-p and top-k -> top-p of the mass that they leave
-> argmax(logits + gumbel). LogprobsMode selects from which end of it logprobs are taken.

The noise is counter-based: a 32-bit hash of (seed, position, token id), with the same integers in numpy, torch, Triton
and JAX for any batch: two runs with one seed differ only where their logits do. In float32 that changes no token in
practice; in bfloat16 a batch's rounding can decide near-ties. Greedy rows have no noise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

LogprobsMode = Literal["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"]
"""Which logprobs are reported. raw: of the model's logits. processed: of the logits the token is sampled from, after
all rules; excluded tokens have minus infinity. A greedy row has no temperature and no filters. Prompt tokens are not
sampled, so theirs are always raw."""

OUTPUT_TOKENS: Final = "output_token_ids"
"""Key of `SamplingRules.extra_args`: the tokens that the backend `simulated` answers with."""

GREEDY_EPSILON: Final = 1e-5
"""Temperatures below this are greedy."""


NO_HISTORY: Final[Mapping[str, Any]] = {
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "bad_words": (),
}
"""The rules that read earlier tokens, without effect."""


@dataclass(frozen=True, slots=True)
class SamplingRules:
    """One request's sampling, resolved: token ids instead of words, a concrete seed."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    min_tokens: int = 0
    stop_ids: tuple[int, ...] = ()  # masked while fewer than `min_tokens` tokens were generated
    seed: int = 0
    logprobs: int | None = None  # best tokens to report; 0: only the sampled one, -1: all, None: no report
    prompt_logprobs: int | None = None  # number of logprobs of each prompt token; None: none
    logprob_token_ids: tuple[int, ...] = ()  # report these instead of the best; `logprobs` is -1 then
    extra_args: Mapping[str, Any] | None = None  # read by logits processors only

    @property
    def is_greedy(self) -> bool:
        """True when the best token is taken, without noise."""
        return self.temperature < GREEDY_EPSILON

    @property
    def has_penalties(self) -> bool:
        """True when penalties change the logits."""
        return bool(self.presence_penalty or self.frequency_penalty) or self.repetition_penalty != 1.0

    @property
    def reads_history(self) -> bool:
        """True when earlier tokens change the logits: penalties, or banned words of several tokens."""
        return self.has_penalties or any(len(word) > 1 for word in self.bad_words)

    @property
    def history_field(self) -> str:
        """The request's first field for which earlier tokens are read; see `reads_history`."""
        return next((name for name, neutral in NO_HISTORY.items() if getattr(self, name) != neutral), "bad_words")

    @property
    def penalties(self) -> tuple[float, float, float]:
        """The repetition, frequency and presence penalty, in the order in which they are packed for a device."""
        return self.repetition_penalty, self.frequency_penalty, self.presence_penalty


# Rules that together have every kind of sampling parameters: backends warm up with them.

FILTERED: Final = SamplingRules(temperature=1.0, top_k=5, top_p=0.9, min_p=0.05)

PENALISED: Final = SamplingRules(repetition_penalty=1.1, presence_penalty=0.1, frequency_penalty=0.1)

MOST_MEMORY: Final = SamplingRules(
    temperature=1.0, top_k=5, top_p=0.9, repetition_penalty=1.1, allowed_token_ids=(0, 1), logprobs=5, prompt_logprobs=5
)
"""The sampling parameters that take the most memory."""

EVERY_KIND: Final = (
    SamplingRules(),
    SamplingRules(temperature=1.0),
    FILTERED,
    PENALISED,
    SamplingRules(logit_bias=((0, 1.0),), bad_words=((1,), (0, 1)), min_tokens=99, stop_ids=(1,)),
    SamplingRules(allowed_token_ids=(0, 1)),
    *(SamplingRules(logprobs=best, prompt_logprobs=best) for best in (0, 1, 5, -1)),
)
"""Every kind of sampling parameters; the first are greedy."""


U32 = npt.NDArray[np.uint32]

# Multipliers of the "lowbias32" finaliser (C. Wellons, hash-prospector): low bias at two multiplications.
MIX_1: Final = 0x7FEB352D
MIX_2: Final = 0x846CA68B
TOKEN_STRIDE: Final = 0x9E3779B9

LARGEST_UNIFORM: Final = 1.0 - 2.0**-24
"""Of the noise of a token: the largest float32 below 1, whose noise would be -infinity."""


def mix(x: U32) -> U32:
    """lowbias32 of uint32 values, element by element."""
    x = x ^ (x >> np.uint32(16))
    x = x * np.uint32(MIX_1)
    x = x ^ (x >> np.uint32(15))
    x = x * np.uint32(MIX_2)
    return x ^ (x >> np.uint32(16))


def noise_keys(seeds: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]) -> U32:
    """Return the hash of (seed, position) that each row's token noise starts from, uint32 [S].

    `seeds` int64 [S]; `positions` int64 [S] of the token to be sampled.
    """
    return mix(noise_counters(seeds, positions))


def noise_counters(seeds: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]) -> U32:
    """Return the uint32 [S] that `noise_keys` mixes last: of position p + 1 it is one more than of p, modulo 2^32."""
    wide = seeds.astype(np.uint64)
    low = (wide & np.uint64(0xFFFFFFFF)).astype(np.uint32)
    high = (wide >> np.uint64(32)).astype(np.uint32)
    return mix(mix(low) ^ high) + positions.astype(np.uint32)


def gumbel(keys: U32, token_ids: U32) -> npt.NDArray[np.float32]:
    """Return the Gumbel noise of tokens, float32 [S, n]. `keys` uint32 [S], `token_ids` uint32 [S, n] or [n].

    It is -log(-log(1 - v)) of a uniform v with 32 bits, whose small values, those of the tokens that win, float32 holds
    exactly: up to 22.9 in steps of an ulp. log(1 - v) loses nothing either (W. Kahan: log(u) v / (1 - u), u = 1 - v).
    """
    bits = mix(keys[:, None] ^ (token_ids * np.uint32(TOKEN_STRIDE)))
    v = (bits.astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-32)
    u = np.float32(1.0) - np.minimum(v, np.float32(LARGEST_UNIFORM))
    tiny = u == np.float32(1.0)
    exponential = np.where(tiny, v, -np.log(u) * v / np.where(tiny, np.float32(1.0), np.float32(1.0) - u))
    noise: npt.NDArray[np.float32] = -np.log(exponential)
    return noise
