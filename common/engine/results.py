"""What a step's result means for each request: its new token, whether it finishes, the logprobs it reports.

Knows requests and results; queues, rows and blocks are the scheduler's.
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


def append_tokens(
    requests: Sequence[Request],
    tokens: Sequence[int],
    logprobs: Mapping[int, TokenLogprobs],
    ended_by_mask: Mapping[int, RequestStatus],
) -> tuple[list[EngineOutput], list[Ending]]:
    """Append each request's new token. Returns the outputs, and the final status of the requests that end.

    `tokens`: one per request, negative where none was sampled. `logprobs`, `ended_by_mask`: by index in `requests`.
    Results of finished requests are dropped. A request that was preempted after the step was planned still gets its
    token: it will not be sampled again.
    """
    outputs: list[EngineOutput] = []
    ended: list[Ending] = []
    for index, (request, token) in enumerate(zip(requests, tokens)):
        if token < 0 or (request.status is not RUNNING and request.is_finished):
            continue
        request.outputs.append(token)
        status = RUNNING
        if token in request.stop_token_ids or len(request.outputs) == request.max_outputs or index in ended_by_mask:
            status = finish_status(request, token, len(request.outputs))
            if status is RUNNING:
                status = ended_by_mask.get(index, RUNNING)
            if status is not RUNNING:
                ended.append((request, status))
        if status is RUNNING and request.has_token_only:
            output = EngineOutput(
                request_id=request.request_id,
                new_token_ids=[token],
                num_cached_tokens=request.num_cached_tokens or 0,
            )
        else:
            output = _detailed_output(request, token, status, logprobs.get(index))
        outputs.append(output)
    return outputs, ended


def finish_status(request: Request, token: int, generated: int) -> RequestStatus:
    """Return the status after `token`, the last of `generated`. Stop tokens count from `min_tokens` on."""
    if token in request.stop_token_ids and generated >= request.rules.min_tokens:
        return RequestStatus.FINISHED_STOPPED
    return RequestStatus.FINISHED_LENGTH if generated == request.max_outputs else RUNNING


def keep_prompt_logprobs(requests: Sequence[Request], result: StepResult) -> None:
    """Append a chunk's prompt logprobs to those of the chunks before."""
    for index, block in result.prompt_logprobs.items():
        request = requests[index]
        if request.prompt_logprobs is not None and not request.is_finished:
            request.prompt_logprobs.extend(_positions(block))


def _detailed_output(
    request: Request, token: int, status: RequestStatus, logprobs: TokenLogprobs | None
) -> EngineOutput:
    """Return the output of a request that starts, ends, was preempted or reports logprobs.

    Prompt logprobs and the schedule time go out with the first output.
    """
    prompt_logprobs, request.prompt_logprobs = request.prompt_logprobs, None
    request.has_token_only = request.is_plain
    stopped = status is RequestStatus.FINISHED_STOPPED and token not in request.eos_token_ids
    stopped = stopped and token in request.stop_token_ids  # else it ended the grammar
    mask_state = request.mask_state
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
        error=None if mask_state is None or mask_state.error is None else (FIELD, f"{FIELD}: {mask_state.error}"),
    )


def _positions(block: TokenLogprobs, only: Sequence[int] = ()) -> list[PositionLogprobs]:
    """Return the block as messages. `only`: report these tokens instead of the best; the block then has all tokens."""
    columns = zip(block.token_ids.tolist(), block.logprobs.tolist(), block.ranks.tolist())
    if not only:
        return [PositionLogprobs(token_ids=ids, logprobs=values, rank=rank) for ids, values, rank in columns]
    positions = []
    for ids, values, rank in columns:
        rank_of = {token: position for position, token in enumerate(ids[1:], start=1)}
        ranks = [rank_of[token] for token in only]
        positions.append(
            PositionLogprobs(
                token_ids=[ids[0], *only],
                logprobs=[values[0], *(values[position] for position in ranks)],
                rank=rank,
                ranks=ranks,
            )
        )
    return positions
