"""Samplers of other servers as logits processors, which the operator loads by name (--logits-processors typical_p).

A request sets them by the fields of those servers; each reads its own of SamplingParams.extra_args. They see the logits
where vLLM's processors do: after biases and masks, before penalties and temperature.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import numpy as np

from pagoda.common.engine.sampling.rules import noise_keys
from pagoda.server.vllm.logits_processors import AdapterLogitsProcessor, RequestLogitsProcessor

_MINUS_INFINITY: Final = float("-inf")


@dataclass(frozen=True, slots=True)
class SamplerArgument:
    """A number of `extra_args`: its bounds, and its value without effect."""

    low: float
    high: float
    neutral: float
    whole: bool = False


class ExtraSampler(AdapterLogitsProcessor):
    """A sampler whose arguments are numbers."""

    arguments: ClassVar[Mapping[str, SamplerArgument]]

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """Raise ValueError for an argument that is no number or outside its bounds."""
        for name, argument in cls.arguments.items():
            value = (sampling_params.extra_args or {}).get(name, argument.neutral)
            if isinstance(value, bool) or not isinstance(value, int if argument.whole else int | float):
                raise ValueError(f"{name} must be {'an integer' if argument.whole else 'a number'}")
            if not argument.low <= value <= argument.high:
                raise ValueError(f"{name} is {value}; it must be from {argument.low:g} to {argument.high:g}")

    def is_argmax_invariant(self) -> bool:
        return False

    @classmethod
    def value(cls, params: Any, name: str) -> Any:
        """Return an argument of a request's SamplingParams."""
        return (params.extra_args or {}).get(name, cls.arguments[name].neutral)


class NoRepeatNgram(ExtraSampler):
    """Excludes the tokens that would complete n tokens in a row which the prompt or the output has already.

    If biases and masks, such as a grammar's, leave no other token, none is excluded.
    """

    arguments: ClassVar[Mapping[str, SamplerArgument]] = {
        "no_repeat_ngram_size": SamplerArgument(low=0, high=64, neutral=0, whole=True)
    }

    def new_req_logits_processor(self, params: Any) -> RequestLogitsProcessor | None:
        size = self.value(params, "no_repeat_ngram_size")
        return _Ngrams(size) if size else None


class _Ngrams:
    """The n-grams of one sequence: which tokens have followed n - 1 others."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._tokens: list[int] = []
        self._prompt: int | None = None  # how many of them are the prompt
        self._following: dict[tuple[int, ...], set[int]] = defaultdict(set)

    def __call__(self, prompt_ids: Sequence[int], output_ids: Sequence[int], logits: Any) -> Any:
        if self._prompt is None:
            self._prompt = len(prompt_ids)
            self._add(prompt_ids)
        self._add(output_ids[len(self._tokens) - self._prompt :])
        before = self._size - 1
        latest = tuple(self._tokens[len(self._tokens) - before :])
        excluded = self._following.get(latest) if len(latest) == before else None
        if not excluded:
            return logits
        edited = logits.clone()
        edited[sorted(token for token in excluded if 0 <= token < len(logits))] = _MINUS_INFINITY
        return edited if bool((edited > _MINUS_INFINITY).any()) else logits

    def _add(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self._tokens.append(token)
            start = len(self._tokens) - self._size
            if start >= 0:
                self._following[tuple(self._tokens[start:-1])].add(token)


class TypicalP(ExtraSampler):
    """Keeps the tokens whose information is nearest to the entropy, until their mass reaches p.

    Source: Meister et al., "Locally Typical Sampling" (2022).
    """

    arguments: ClassVar[Mapping[str, SamplerArgument]] = {"typical_p": SamplerArgument(low=0, high=1, neutral=1)}

    def new_req_logits_processor(self, params: Any) -> RequestLogitsProcessor | None:
        p = self.value(params, "typical_p")

        def edit(output_ids: Sequence[int], logits: Any) -> Any:
            logs = logits.log_softmax(-1)
            probabilities = logs.exp()
            entropy = -(probabilities * logs).nan_to_num(0.0).sum()
            order = (logs + entropy).abs().argsort(stable=True)
            mass = probabilities[order].cumsum(-1)
            last = min(int((mass < p).sum()), len(mass) - 1)
            logits[order[last + 1 :]] = _MINUS_INFINITY
            return logits

        return edit if p < 1 else None


class Xtc(ExtraSampler):
    """Excludes the top choices, with `xtc_probability`: of the tokens from `xtc_threshold` on all but the least likely.

    Whether it does is drawn from the seed and the position. Source: llama.cpp's sampler of that name.
    """

    arguments: ClassVar[Mapping[str, SamplerArgument]] = {
        "xtc_probability": SamplerArgument(low=0, high=1, neutral=0),
        "xtc_threshold": SamplerArgument(low=0, high=1, neutral=0.1),
    }

    def new_req_logits_processor(self, params: Any) -> RequestLogitsProcessor | None:
        probability = self.value(params, "xtc_probability")
        threshold = self.value(params, "xtc_threshold")
        seed = np.array([(params.seed or 0) ^ _XTC_SEEDS])

        def edit(prompt_ids: Sequence[int], output_ids: Sequence[int], logits: Any) -> Any:
            position = np.array([len(prompt_ids) + len(output_ids)])
            if int(noise_keys(seed, position)[0]) >= probability * 2**32:
                return logits
            probabilities = logits.softmax(-1)
            top = probabilities >= threshold
            if int(top.sum()) < 2:
                return logits
            least = probabilities[top].min()
            logits[top & (probabilities > least)] = _MINUS_INFINITY
            return logits

        return edit if probability > 0 else None


_XTC_SEEDS: Final = 0x5DEECE66D
"""Makes the draws of Xtc others than those of tokens."""

EXTRA_SAMPLERS: Final[Mapping[str, type[ExtraSampler]]] = {
    "no_repeat_ngram_size": NoRepeatNgram,
    "typical_p": TypicalP,
    "xtc": Xtc,
}
"""By name for --logits-processors."""


def sampler_of(argument: str) -> str | None:
    """Return the name of the sampler that reads an argument; None for one that no sampler here reads."""
    return next((name for name, sampler in EXTRA_SAMPLERS.items() if argument in sampler.arguments), None)
