"""Beam search over an engine: the params of its steps, its checks, and completions from beams.

common.beam_search selects the beams.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pagoda.common.beam_search import Beam, BeamSearch, BeamSearchParams
from pagoda.common.config.groups.model import ModelConfig
from pagoda.common.errors import RequestError
from pagoda.common.sampling_params import RequestOutputKind, SamplingParams
from pagoda.common.text.tokenizer import Detokenizer, Tokenizer
from pagoda.server.core_client.ipc_messages import EngineInfo
from pagoda.server.outputs import CompletionOutput, RequestOutput
from pagoda.server.processing.inputs import PromptType


def step_params(params: BeamSearchParams) -> SamplingParams:
    """Return params for one step: one token with its candidates' logprobs."""
    return SamplingParams(
        max_tokens=1,
        temperature=0.0,
        logprobs=params.candidates,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def candidates_of(output: RequestOutput) -> dict[int, float]:
    """Return the logprobs of the best next tokens of one beam."""
    (position,) = output.outputs[0].logprobs or ({},)
    return {token: logprob.logprob for token, logprob in position.items()}


def check_engine(config: ModelConfig, params: BeamSearchParams, info: EngineInfo) -> None:
    """Raise RequestError for an encoder-decoder model, and if the engine does not report the logprobs it needs."""
    if info.encoder is not None:
        raise RequestError("use_beam_search", "beam search does not support encoder-decoder models; leave it out")
    if config.logprobs_mode != "raw_logprobs":
        raise RequestError(
            "use_beam_search", f"beam search needs --logprobs-mode raw_logprobs; it is {config.logprobs_mode}"
        )
    limit = info.vocab_size if config.max_logprobs == -1 else min(config.max_logprobs, info.vocab_size)
    if params.candidates > limit:
        raise RequestError(
            "beam_width",
            f"a beam search {params.beam_width} wide needs {params.candidates} logprobs a step; "
            f"the limit is {limit} (--max-logprobs)",
        )


def check_prompts(prompts: Iterable[PromptType]) -> None:
    """Raise RequestError for a prompt without token ids."""
    if any(isinstance(prompt, Mapping) and prompt.get("prompt_embeds") is not None for prompt in prompts):
        raise RequestError("prompt_embeds", "beam search needs tokens, which prompt_embeds replace; drop one")


@dataclass(frozen=True, slots=True)
class BeamText:
    """Turns beams into completions."""

    tokenizer: Tokenizer | None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_end: bool = False

    def completions(self, prompt_token_ids: list[int], beams: Sequence[Beam]) -> list[CompletionOutput]:
        """Return a completion per beam, in order."""
        return [self._completion(index, prompt_token_ids, beam) for index, beam in enumerate(beams)]

    def _completion(self, index: int, prompt_token_ids: list[int], beam: Beam) -> CompletionOutput:
        shown = beam.token_ids if self.include_end or not beam.ended else beam.token_ids[:-1]
        return CompletionOutput(
            index=index,
            text=self._text(prompt_token_ids, shown),
            token_ids=list(beam.token_ids),
            cumulative_logprob=beam.logprob,
            finish_reason="stop" if beam.ended else "length",
        )

    def _text(self, prompt_token_ids: list[int], token_ids: Sequence[int]) -> str:
        if self.tokenizer is None:
            return ""
        detokenizer = Detokenizer(
            self.tokenizer,
            prompt_token_ids,
            skip_special_tokens=self.skip_special_tokens,
            spaces_between_special_tokens=self.spaces_between_special_tokens,
        )
        return detokenizer.append(token_ids, True)


# Beams of LLM.beam_search: all prompts in lockstep.

Generate = Callable[[list[dict[str, Any]], SamplingParams], list[RequestOutput]]
"""Generates for token prompts and returns the outputs in order."""


@dataclass(slots=True)
class BeamSearchSequence:
    """One beam. `tokens` and `text` include the prompt."""

    tokens: list[int]
    cum_logprob: float
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    lora_request: None = None


@dataclass(slots=True)
class BeamSearchOutput:
    """The beams of one prompt, best first."""

    sequences: list[BeamSearchSequence] = field(default_factory=list)


def search_beams(
    generate: Generate,
    prompts: Sequence[list[int]],
    params: BeamSearchParams,
    *,
    ends: frozenset[int],
    max_model_len: int,
    tokenizer: Tokenizer | None,
) -> list[BeamSearchOutput]:
    """Search all prompts (token ids) in lockstep, so that each batch has the live beams of all of them."""
    searches = [BeamSearch(params, ends, max_model_len - len(prompt)) for prompt in prompts]
    sampling = step_params(params)
    while live := [index for index, search in enumerate(searches) if not search.finished]:
        beams = [(index, beam) for index in live for beam in searches[index].live]
        outputs = generate([{"prompt_token_ids": [*prompts[i], *beam.token_ids]} for i, beam in beams], sampling)
        for index in live:
            searches[index].take([candidates_of(out) for out, (owner, _) in zip(outputs, beams) if owner == index])
    return [
        BeamSearchOutput([_sequence(prompt, beam, params, tokenizer) for beam in search.best()])
        for prompt, search in zip(prompts, searches)
    ]


def _sequence(
    prompt: list[int], beam: Beam, params: BeamSearchParams, tokenizer: Tokenizer | None
) -> BeamSearchSequence:
    keeps_end = params.include_stop_str_in_output or not beam.ended
    tokens = [*prompt, *(beam.token_ids if keeps_end else beam.token_ids[:-1])]
    return BeamSearchSequence(
        tokens=tokens,
        cum_logprob=beam.logprob,
        text=None if tokenizer is None else tokenizer.decode(tokens, params.skip_special_tokens),
        finish_reason="stop" if beam.ended else "length",
    )
