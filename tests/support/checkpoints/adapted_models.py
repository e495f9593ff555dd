"""Random LoRA adapters, the models that they make of another, and logits of steps that mix them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from support.engines.reference_driver import Driver, random_weights

from pagoda.backends.reference.model.naive.model import NaiveModel
from pagoda.common.backend import Weight
from pagoda.common.engine.sampling.rules import SamplingRules
from pagoda.common.models.primitives import Param
from pagoda.common.models.spec import ModelSpec
from pagoda.common.weights.lora.weights import AdapterWeights, LowRank, has_factors

Float32 = npt.NDArray[np.float32]

EVERY = SamplingRules(logprobs=-1, prompt_logprobs=-1)
"""Greedy, with the log-probabilities of all tokens at every position."""


def random_adapter(
    matrices: Mapping[str, Param],
    rank: int,
    seed: int,
    only: tuple[str, ...] = ("",),
    *,
    dora: bool = False,
    copied: tuple[str, ...] = (),
) -> AdapterWeights:
    """An adapter of the matrices whose names end in one of `only`. `dora`: with factors where there may be some.

    `copied`: the parameters of which it has a whole copy, beside its low-rank product.
    """
    rng, made = np.random.default_rng(1000 + seed), {}
    for name, param in matrices.items():
        *stack, outputs, inputs = param.shape
        if name.endswith(only) or name in copied:
            a, b = (rng.standard_normal(shape) for shape in ((*stack, rank, inputs), (*stack, outputs, rank)))
            channels = inputs if name == "embed" else outputs
            factor = rng.uniform(0.5, 1.5, channels).astype(np.float32) if dora and has_factors(param) else None
            copy = rng.standard_normal(param.shape, np.float32) * np.float32(0.3) if name in copied else None
            made[name] = LowRank((a * inputs**-0.5).astype(np.float32), (0.3 * b).astype(np.float32), factor, copy)
    return AdapterWeights(rank, made)


def merged(spec: ModelSpec, weights: Iterable[Weight], adapter: AdapterWeights | None) -> NaiveModel:
    """The model with W + B A, or diag(f) W + B A, in place of every W; its head is its own, as an adapter's is."""
    values = dict(weights)
    if spec.tied:
        values["head"] = values["embed"]
    if adapter is not None:
        for name, matrix in adapter.matrices.items():
            product = (matrix.b.astype(np.float64) @ matrix.a.astype(np.float64)).astype(np.float32)
            factor = np.float32(1) if matrix.factor is None else matrix.factor
            base = values[name] if matrix.copy is None else matrix.copy
            values[name] = base * (factor if name == "embed" or factor.ndim == 0 else factor[:, None]) + product
    return NaiveModel(replace(spec, tied=False), list(values.items()), max_len=128)


def logprobs_of(model: NaiveModel, token_ids: list[int]) -> Float32:
    """Log-probabilities [T, V] after each of the tokens."""
    return torch.log_softmax(model.logits(token_ids).double(), -1).float().numpy()


def run(
    driver: Driver, prompts: Mapping[int, list[int]], slots: Mapping[int, int], steps: int = 3
) -> dict[int, tuple[list[int], Float32]]:
    """Prefill all prompts in one step, then decode: row -> its tokens, and log-probabilities [T, V] after each.

    Those after the last prompt token and later ones are of the steps that sample.
    """
    tokens = {row: list(prompt) for row, prompt in prompts.items()}
    found: dict[int, list[Float32]] = {row: [] for row in prompts}
    pieces, starts = dict(prompts), [driver.start(row, prompt, EVERY) for row, prompt in prompts.items()]
    for _ in range(1 + steps):
        rows, result = driver.step(pieces, starts, adapters=slots)
        for sequence, row in enumerate(rows):
            if sequence in result.prompt_logprobs:
                found[row].append(_by_token(result.prompt_logprobs[sequence]))
            found[row].append(_by_token(result.logprobs[sequence]))
            tokens[row].append(int(result.token_ids[sequence]))
        pieces, starts = {row: [tokens[row][-1]] for row in prompts}, []
    return {row: (tokens[row], np.concatenate(found[row])) for row in prompts}


def _by_token(logprobs) -> Float32:
    """[n, V] of log-probabilities in order of rank."""
    out = np.full((len(logprobs.token_ids), logprobs.token_ids.shape[1] - 1), np.nan, np.float32)
    np.put_along_axis(out, logprobs.token_ids[:, 1:], logprobs.logprobs[:, 1:], 1)
    return out


def weights_of(spec: ModelSpec) -> list[Weight]:
    return list(random_weights(spec))
