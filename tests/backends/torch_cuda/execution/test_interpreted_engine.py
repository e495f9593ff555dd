"""Whole steps through the Triton kernels, interpreted: the tensors of a step are as the kernels want them."""

from __future__ import annotations

from dataclasses import replace

from support.engines.reference_driver import Driver, tiny_spec

from pagoda.backends.torch_cuda.device import CPU, Device
from pagoda.common.engine.sampling.rules import SamplingRules
from pagoda.common.engine.steps.contract import PREVIOUS

PROMPTS = {0: [5, 17, 3, 80, 41], 1: [2, 9, 60], 2: [33, 21]}
RULES = {
    0: SamplingRules(logprobs=2, repetition_penalty=1.3, bad_words=((7,), (8, 9)), logit_bias=((4, 2.0),)),
    1: SamplingRules(temperature=1.0, top_k=20, top_p=0.9, min_p=0.01, seed=3),
    2: SamplingRules(temperature=0.8, seed=4, allowed_token_ids=tuple(range(50)), prompt_logprobs=1),
}


class Interpreted(Device):
    """A CPU that runs kernels."""

    @property
    def use_kernels(self) -> bool:
        return True


def answers(d: Driver) -> dict[int, list[int]]:
    """Row 0 is a token ahead when the others join, whose prompts come whole."""
    _, result = d.step({0: PROMPTS[0]}, [d.start(0, PROMPTS[0], RULES[0])])
    tokens = {0: [int(result.token_ids[0])], 1: [], 2: []}
    pieces = {0: [PREVIOUS], 1: PROMPTS[1], 2: PROMPTS[2]}
    starts = [d.start(row, PROMPTS[row], RULES[row]) for row in (1, 2)]
    for _ in range(2):
        rows, result = d.step(pieces, starts)
        for row, token in zip(rows, result.token_ids.tolist()):
            tokens[row].append(token)
        pieces, starts = {row: [PREVIOUS] for row in PROMPTS}, []
    return tokens


def test_tokens_are_those_of_the_references() -> None:
    spec = tiny_spec(window=3, softcap=2.0)
    spec = replace(spec, layers=spec.layers[1:])
    want = answers(Driver(spec, "scattered", rows=4))
    interpreted = Interpreted(CPU.torch, CPU.chip, "interpreter")
    assert answers(Driver(spec, "scattered", rows=4, backend="torch_cuda", device=interpreted)) == want
