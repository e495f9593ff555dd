"""The engine's input for a prompt, without running it: token ids, sampling parameters, positions of the tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pagoda.common.sampling_params import SamplingParams
from pagoda.common.text.literal_stretches import Span, without_start
from pagoda.server.http.state import ServerState
from pagoda.server.processing.inputs import Prompt, PromptType

_DEFAULTS: Final = SamplingParams()


@dataclass(frozen=True, slots=True, kw_only=True)
class PreviewOptions:
    """Fields of a request that its preview repeats or needs."""

    stream: bool = False
    stream_options: Mapping[str, Any] | None = None
    cache_salt: str | None = None
    priority: int = 0
    offsets: bool = False  # Report each token's position in the text.
    special_tokens: bool  # The prompt was tokenised with the tokenizer's special tokens.


async def preview(
    state: ServerState, request_id: str, model: str, prompt: PromptType, params: SamplingParams, options: PreviewOptions
) -> dict[str, Any]:
    """Return the token ids and sampling parameters of one prompt. Raise RequestError."""
    ready = await state.llm().preview(prompt, params)
    shown = {
        "request_id": request_id,
        "model": model,
        "token_ids": ready.token_ids,
        "sampling_params": _changed(params),
        "stream": options.stream,
        "stream_options": options.stream_options,
        "cache_salt": options.cache_salt,
        "priority": options.priority,
        "token_offsets": None,
    }
    if options.offsets:
        size = len(ready.text or "")
        special = options.special_tokens
        shown["token_offsets"] = await state.engine.text_threads.run(size, _offsets, state, ready, params, special)
    return shown


def _changed(params: SamplingParams) -> dict[str, Any]:
    """Return the params that are not the default, as JSON values."""
    values = {field.name: getattr(params, field.name) for field in dataclasses.fields(params)}
    values["output_kind"] = params.output_kind.value
    for name in ("structured_outputs", "repetition_detection"):
        values[name] = None if values[name] is None else dataclasses.asdict(values[name])
    return {name: value for name, value in values.items() if value != getattr(_DEFAULTS, name)}


def _offsets(state: ServerState, prompt: Prompt, params: SamplingParams, special: bool) -> list[tuple[int, int]] | None:
    """Return each token's (begin, end) in the text, in characters; None for a prompt of token ids."""
    tokenizer = state.tokenizer()
    text = prompt.text
    kept = len(prompt.token_ids)
    if tokenizer is None or text is None:
        return None
    literal: Sequence[Span] = prompt.literal
    if params.truncate_prompt_tokens is None:
        return tokenizer.offsets(text, special, literal)
    keeps_start = params.truncation_side == "right"
    part = tokenizer.pre_truncate(text, kept, "right" if keeps_start else "left")
    before = 0 if keeps_start else len(text) - len(part)
    offsets = tokenizer.offsets(part, special, without_start(literal, before))
    if keeps_start:
        return offsets[:kept]
    return [(before + begin, before + end) for begin, end in offsets[len(offsets) - kept :]]
