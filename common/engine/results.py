"""What a step's result means for each request: its new token, how it ends, the logprobs it asked for.

Knows requests and results. Does not know queues, rows or blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, TypeAlias

from pagoda.common.engine.messages import EngineOutput, PositionLogprobs
from pagoda.common.engine.request import FINISHED, Request, RequestStatus
from pagoda.common.engine.step import StepResult, TokenLogprobs
from pagoda.common.engine.structured_output.grammar import FIELD

RUNNING: Final = RequestStatus.RUNNING
Ending: TypeAlias = tuple[Request, RequestStatus]


def take_tokens(
    requests: Sequence[Request],
    tokens: Sequence[int],
    logprobs: Mapping[int, TokenLogprobs],
    followed: Mapping[int, RequestStatus],
) -> tuple[list[EngineOutput], list[Ending]]:
    """Give each request its new token. Returns the news, and who ended how. Results of the finished are dropped.

    `tokens`: one per request, negative where none was sampled. `logprobs` and `followed` (who ended by its guide): by
    place in `requests`. A request that was preempted after the step was planned still gets its token: it will not be
    sampled again.
    """
    outputs: list[EngineOutput] = []
    ended: list[Ending] = []
    for index, (request, token) in enumerate(zip(requests, tokens)):
        if token < 0 or (request.status is not RUNNING and request.is_finished):
            continue
        request.outputs.append(token)
        status = RUNNING
        if token in request.stop_token_ids or len(request.outputs) == request.max_outputs or index in followed:
            status = ending(request, token, len(request.outputs))
            if status is RUNNING:
                status = followed.get(index, RUNNING)
            if status is not RUNNING:
                ended.append((request, status))
        if status is RUNNING and request.is_brief:
            news = EngineOutput(
                request_id=request.request_id,
                new_token_ids=[token],
                num_cached_tokens=request.num_cached_tokens or 0,
            )
        else:
            news = _detailed_output(request, token, status, logprobs.get(index))
        outputs.append(news)
    return outputs, ended


def ending(request: Request, token: int, generated: int) -> RequestStatus:
    """How `token`, the last of `generated`, ends the request; RUNNING if it does not.

    A stop token counts from `min_tokens` on.
    """
    if token in request.stop_token_ids and generated >= request.rules.min_tokens:
        return RequestStatus.FINISHED_STOPPED
    return RequestStatus.FINISHED_LENGTH if generated == request.max_outputs else RUNNING


def keep_prompt_logprobs(requests: Sequence[Request], result: StepResult) -> None:
    """Add a chunk's positions to those of the chunks before."""
    for index, block in result.prompt_logprobs.items():
        request = requests[index]
        if request.prompt_logprobs is not None and not request.is_finished:
            request.prompt_logprobs.extend(_positions(block))


def _detailed_output(
    request: Request, token: int, status: RequestStatus, logprobs: TokenLogprobs | None
) -> EngineOutput:
    """The news of a request that starts, ends, was preempted or asked for logprobs.

    Prompt logprobs, and when it was scheduled, go out with the first.
    """
    prompt_logprobs, request.prompt_logprobs = request.prompt_logprobs, None
    request.is_brief = request.is_plain
    stopped = status is RequestStatus.FINISHED_STOPPED and token not in request.eos_token_ids
    stopped = stopped and token in request.stop_token_ids  # else it ended the grammar
    guide = request.guide
    return EngineOutput(
        request_id=request.request_id,
        new_token_ids=[token],
        finish_reason=FINISHED.get(status),
        stop_reason=token if stopped else None,
        logprobs=None if logprobs is None else _positions(logprobs, request.rules.logprob_token_ids),
        prompt_logprobs=prompt_logprobs,
        num_cached_tokens=request.num_cached_tokens or 0,
        scheduled=request.scheduled if len(request.outputs) == 1 else 0.0,
        num_preemptions=request.num_preemptions,
        error=None if guide is None or guide.error is None else (FIELD, f"{FIELD}: {guide.error}"),
    )


def _positions(block: TokenLogprobs, only: Sequence[int] = ()) -> list[PositionLogprobs]:
    """`only`: these tokens in place of the best; the block then holds the whole vocabulary."""
    columns = zip(block.token_ids.tolist(), block.logprobs.tolist(), block.ranks.tolist())
    if not only:
        return [PositionLogprobs(token_ids=ids, logprobs=values, rank=rank) for ids, values, rank in columns]
    found = []
    for ids, values, rank in columns:
        places = {token: place for place, token in enumerate(ids[1:], start=1)}
        ranks = [places[token] for token in only]
        found.append(
            PositionLogprobs(
                token_ids=[ids[0], *only],
                logprobs=[values[0], *(values[place] for place in ranks)],
                rank=rank,
                ranks=ranks,
            )
        )
    return found
