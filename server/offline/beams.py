"""Beam search for lists of prompts, as LLM.beam_search gives it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pagoda.common.beam_search import Beam, BeamSearch, BeamSearchParams
from pagoda.common.sampling_params import SamplingParams
from pagoda.common.text.tokenizer import Tokenizer
from pagoda.server.outputs import RequestOutput
from pagoda.server.requests.beams import candidates_of, step_params

Generate = Callable[[list[dict[str, Any]], SamplingParams], list[RequestOutput]]
"""Answers to token prompts, in their order."""


@dataclass(slots=True)
class BeamSearchSequence:
    """One answer. `tokens` and `text` begin with the prompt's."""

    tokens: list[int]
    cum_logprob: float
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    lora_request: None = None


@dataclass(slots=True)
class BeamSearchOutput:
    """The answers to one prompt, best first."""

    sequences: list[BeamSearchSequence] = field(default_factory=list)


def search(
    generate: Generate,
    prompts: Sequence[list[int]],
    params: BeamSearchParams,
    *,
    ends: frozenset[int],
    max_model_len: int,
    tokenizer: Tokenizer | None,
) -> list[BeamSearchOutput]:
    """Search for all prompts (token ids) in step, so that each batch holds the live beams of all of them."""
    searches = [BeamSearch(params, ends, max_model_len - len(prompt)) for prompt in prompts]
    asked = step_params(params)
    while live := [index for index, each in enumerate(searches) if not each.finished]:
        beams = [(index, beam) for index in live for beam in searches[index].live]
        outputs = generate([{"prompt_token_ids": [*prompts[i], *beam.token_ids]} for i, beam in beams], asked)
        for index in live:
            searches[index].take([candidates_of(out) for out, (owner, _) in zip(outputs, beams) if owner == index])
    return [
        BeamSearchOutput([_sequence(prompt, beam, params, tokenizer) for beam in each.best()])
        for prompt, each in zip(prompts, searches)
    ]


def _sequence(
    prompt: list[int], beam: Beam, params: BeamSearchParams, tokenizer: Tokenizer | None
) -> BeamSearchSequence:
    keeps_end = params.include_stop_str_in_output or not beam.ended
    tokens = [*prompt, *(beam.token_ids if keeps_end else beam.token_ids[:-1])]
    return BeamSearchSequence(
        tokens=tokens,
        cum_logprob=beam.logprob,
        text=None if tokenizer is None else tokenizer.decode(tokens),
        finish_reason="stop" if beam.ended else "length",
    )
