"""What a sampled token means for its request."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from pagoda.common.engine.messages import EngineOutput, EngineRequest, PositionLogprobs
from pagoda.common.engine.sampling.rules import SamplingRules
from pagoda.common.engine.scheduling.request import Request, RequestStatus
from pagoda.common.engine.scheduling.scheduler import append_tokens, finish_status, keep_prompt_logprobs
from pagoda.common.engine.steps.contract import StepResult, TokenLogprobs

STOPPED, LENGTH, RUNNING = RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH, RequestStatus.RUNNING


def request(max_tokens: int = 4, rules: SamplingRules | None = None, **settings) -> Request:
    made = Request.of(
        EngineRequest(
            request_id="r",
            prompt_token_ids=[1, 2],
            rules=rules or SamplingRules(),
            max_tokens=max_tokens,
            stop_token_ids=frozenset({7, 8}),
            eos_token_ids=frozenset({8}),
            **settings,
        ),
        limit=2 + max_tokens,
        rank=(1,),
    )
    made.status = RUNNING
    return made


def logprobs(*rows: tuple[int, ...], rank: int = 1) -> TokenLogprobs:
    ids = np.array(rows, np.int32)
    return TokenLogprobs(ids, (-ids / 4).astype(np.float32), np.full(len(rows), rank, np.int32))


def take(made: Request, token: int, block: TokenLogprobs | None = None, **ended) -> tuple[EngineOutput, list]:
    (output,), endings = append_tokens([made], [token], {} if block is None else {0: block}, ended)
    return output, [status for _, status in endings]


def test_tokens_are_appended_to_their_requests() -> None:
    one, two, three = request(), request(), request()
    outputs, ended = append_tokens([one, two, three], [5, -1, 0], {}, {})
    assert ([each.new_token_ids for each in outputs], ended) == ([[5], [0]], [])
    assert [one.outputs, two.outputs, three.outputs] == [[5], [], [0]]


@pytest.mark.parametrize("status", [STOPPED, RequestStatus.FINISHED_ABORTED])
def test_finished_requests_take_no_more(status: RequestStatus) -> None:
    made = request()
    made.status = status
    assert append_tokens([made], [5], {}, {}) == ([], [])
    assert made.outputs == []


def test_a_preempted_request_takes_its_token() -> None:
    made = request()
    made.status = RequestStatus.PREEMPTED
    assert take(made, 5)[0].new_token_ids == [5]


@pytest.mark.parametrize(("token", "reason"), [(7, 7), (8, None)])
def test_a_stop_token_is_the_stop_reason_and_eos_is_not(token: int, reason: int | None) -> None:
    output, ended = take(request(), token)
    assert (output.finish_reason, output.stop_reason, ended) == ("stop", reason, [STOPPED])


def test_at_max_tokens_it_ends_by_length_unless_it_stops() -> None:
    made = request(2)
    assert take(made, 5)[1] == []
    output, ended = take(made, 5)
    assert (output.finish_reason, output.stop_reason, ended) == ("length", None, [LENGTH])
    assert take(request(1), 7)[1] == [STOPPED]


def test_stop_tokens_count_from_min_tokens_on() -> None:
    rules = SamplingRules(min_tokens=2)
    made = request(rules=rules)
    output, ended = take(made, 7)
    assert (output.finish_reason, output.stop_reason, ended) == (None, None, [])
    assert take(made, 7)[1] == [STOPPED]
    assert [finish_status(request(2, rules), 7, count) for count in (1, 2)] == [RUNNING, STOPPED]


def test_a_mask_ends_a_request_that_would_go_on() -> None:
    made = request()
    (output,), ended = append_tokens([made], [5], {}, {0: STOPPED})
    assert (output.finish_reason, output.stop_reason, ended) == ("stop", None, [(made, STOPPED)])
    made = request(1)
    assert append_tokens([made], [5], {}, {0: STOPPED})[1] == [(made, LENGTH)]
    assert append_tokens([request()], [5], {}, {1: STOPPED})[1] == []


def test_a_mask_without_a_next_token_is_an_error() -> None:
    made = request()
    made.mask_state = SimpleNamespace(error="why")
    (output,), ended = append_tokens([made], [5], {}, {0: RequestStatus.FINISHED_ERROR})
    assert (output.finish_reason, output.error) == ("error", ("structured_outputs", "structured_outputs: why"))
    assert ended == [(made, RequestStatus.FINISHED_ERROR)]
    made = request()
    made.mask_state = SimpleNamespace(error=None)
    assert take(made, 5)[0].error is None


def test_the_first_output_has_the_details_and_the_next_a_token() -> None:
    made = request()
    made.num_cached_tokens, made.scheduled, made.num_preemptions = 3, 2.5, 1
    first = EngineOutput(request_id="r", new_token_ids=[5], num_cached_tokens=3, scheduled=2.5, num_preemptions=1)
    assert take(made, 5)[0] == first
    assert take(made, 6)[0] == EngineOutput(request_id="r", new_token_ids=[6], num_cached_tokens=3)
    assert take(made, 7)[0] == EngineOutput(
        request_id="r",
        new_token_ids=[7],
        finish_reason="stop",
        stop_reason=7,
        num_cached_tokens=3,
        num_preemptions=1,
    )


def test_no_cached_tokens_are_zero() -> None:
    made = request()
    assert [take(made, 5)[0].num_cached_tokens for _ in range(2)] == [0, 0]


def test_logprobs_are_reported_with_every_token() -> None:
    made = request(rules=SamplingRules(logprobs=1))
    for _ in range(2):
        output, _ = take(made, 5, logprobs((5, 4), rank=2))
        assert output.logprobs == [PositionLogprobs(token_ids=[5, 4], logprobs=[-1.25, -1.0], rank=2)]


def test_logprobs_of_named_tokens() -> None:
    """The block has the chosen token and then all, the best first."""
    made = request(rules=SamplingRules(logprobs=-1, logprob_token_ids=(2, 9)))
    output, _ = take(made, 5, logprobs((5, 9, 5, 2), rank=2))
    assert output.logprobs == [
        PositionLogprobs(token_ids=[5, 2, 9], logprobs=[-1.25, -0.5, -2.25], rank=2, ranks=[3, 1])
    ]


def test_prompt_logprobs_are_joined_and_sent_once() -> None:
    made, other, done = request(rules=SamplingRules(prompt_logprobs=0)), request(), request()
    done.status, done.prompt_logprobs = STOPPED, []
    for tokens in ((2, 3), (4,)):
        block = logprobs(*((token,) for token in tokens))
        keep_prompt_logprobs([other, made, done], StepResult(0, np.array([-1, -1, -1]), prompt_logprobs={1: block}))
        keep_prompt_logprobs([other, made, done], StepResult(0, np.array([-1, -1, -1]), prompt_logprobs={2: block}))
        keep_prompt_logprobs([other, made, done], StepResult(0, np.array([-1, -1, -1]), prompt_logprobs={0: block}))
    assert (other.prompt_logprobs, done.prompt_logprobs) == (None, [])
    shown = take(made, 5)[0].prompt_logprobs
    assert [each.token_ids for each in shown or []] == [[2], [3], [4]]
    assert take(made, 5)[0].prompt_logprobs is None
