"""coalesce: queued steps are merged into one, and callers read what they would have read step by step."""

from __future__ import annotations

import random
from typing import Any

import pytest
from support.checkpoints.byte_text import byte_tokenizer

from pagoda.common.engine.messages import EngineOutput, EngineRequest, EngineStats, PositionLogprobs, StepOutputs
from pagoda.common.engine.sampling.rules import SamplingRules
from pagoda.common.sampling_params import RepetitionDetectionParams, RequestOutputKind, SamplingParams
from pagoda.server.core_client.ipc_messages import FromEngine, Heartbeat, StepReply
from pagoda.server.core_client.process_client import coalesce
from pagoda.server.processing.inputs import PreparedRequest, Prompt
from pagoda.server.processing.output_processor import OutputProcessor

TEXT = byte_tokenizer()


def output(request_id: str, *tokens: int, **fields: Any) -> EngineOutput:
    return EngineOutput(request_id=request_id, new_token_ids=list(tokens), **fields)


def step(*outputs: EngineOutput, number: int = 0) -> StepReply:
    return StepReply(StepOutputs(outputs=list(outputs), stats=EngineStats(steps=number, last_step_tokens=len(outputs))))


def test_merged_steps_have_one_output_per_sequence() -> None:
    first = step(output("a", 1, num_cached_tokens=7), output("b", 2), number=1)
    second = step(output("c", 3), output("a", 4), number=2)
    third = step(output("a", 5, finish_reason="stop", stop_reason=5), number=3)
    (merged,) = coalesce([first, second, third])
    assert isinstance(merged, StepReply)
    assert merged.outputs.outputs == [
        output("a", 1, 4, 5, num_cached_tokens=7, finish_reason="stop", stop_reason=5),
        output("b", 2),
        output("c", 3),
    ]
    assert merged.outputs.stats.steps == 3
    assert [stats.last_step_tokens for stats in merged.outputs.earlier] == [2, 2]


def test_merging_keeps_schedule_time_and_preemptions() -> None:
    (merged,) = coalesce(
        [
            step(output("a", 1, scheduled=2.5)),
            step(output("a", 2, num_preemptions=1)),
            step(output("a", 3), output("b", 4)),
        ]
    )
    assert isinstance(merged, StepReply)
    assert merged.outputs.outputs == [output("a", 1, 2, 3, scheduled=2.5, num_preemptions=1), output("b", 4)]


def test_merging_keeps_logprobs_in_token_order() -> None:
    one, two, prompt = (PositionLogprobs(token_ids=[n], logprobs=[-n / 2], rank=n) for n in (1, 2, 3))
    (merged,) = coalesce(
        [step(output("a", 1, logprobs=[one], prompt_logprobs=[prompt])), step(output("a", 2, logprobs=[two]))]
    )
    assert isinstance(merged, StepReply)
    assert merged.outputs.outputs == [output("a", 1, 2, logprobs=[one, two], prompt_logprobs=[prompt])]


def test_other_messages_and_errors_keep_their_order() -> None:
    beat, failed = Heartbeat(1, True), step(output("a", finish_reason="error", error=("stop", "no")))
    messages: list[FromEngine] = [step(output("a", 1)), beat, step(output("a", 2)), failed, step(output("b", 3))]
    assert coalesce(messages) == messages, "an error comes after the messages before it"
    assert coalesce([]) == []


def test_a_single_step_is_unchanged() -> None:
    lone = step(output("a", 1))
    assert coalesce([lone]) == [lone]
    assert coalesce([Heartbeat(1, True), lone]) == [Heartbeat(1, True), lone]


def read(
    params: SamplingParams, steps: list[list[EngineOutput]], interval: int = 1
) -> tuple[str, list[int], list[Any], Any, list[str], int]:
    """Return everything a caller reads of the steps, and the requests to abort."""
    processor = OutputProcessor(TEXT, interval)
    child = EngineRequest(request_id="r", prompt_token_ids=[1], rules=SamplingRules(), max_tokens=100)
    processor.add(PreparedRequest("r", Prompt("p", [1]), params, [child], 0.0, 0.0))
    text, tokens, logprobs, stopped = "", [], [], []
    ends: tuple[Any, ...] = ()
    counted = 0
    for outputs in steps:
        ready, aborted = processor.process(outputs)
        stopped += aborted
        for each in ready:
            (answer,) = each.outputs
            text, tokens = text + answer.text, tokens + answer.token_ids
            logprobs += answer.logprobs or []
            ends = (answer.finish_reason, answer.stop_reason, answer.cumulative_logprob)
            counted = each.metrics.num_generation_tokens if each.metrics else 0
            assert each.finished == (answer.finish_reason is not None)
    return text, tokens, logprobs, ends, stopped, counted


ASKED: dict[str, dict[str, Any]] = {
    "nothing": {},
    "stop": {"stop": ["cab", "bb"]},
    "stop, kept": {"stop": ["cab", "bb"], "include_stop_str_in_output": True},
    "stop, late": {"stop": ["a"], "min_tokens": 9},
    "repetition": {"repetition_detection": RepetitionDetectionParams(max_pattern_size=3, min_count=3)},
    "logprobs": {"logprobs": 1, "stop": ["cab"]},
    "interval": {"stream_interval": 3, "stop": ["cab"]},
}


@pytest.mark.parametrize("asked", ASKED)
def test_callers_read_the_same_with_and_without_merging(asked: str) -> None:
    chance = random.Random(asked)
    params = SamplingParams(output_kind=RequestOutputKind.DELTA, max_tokens=100, **ASKED[asked])
    ended_by_text = 0
    for _ in range(60):
        tokens = [TEXT.encode(chance.choice("abc"))[0] for _ in range(chance.randint(2, 24))]
        steps: list[FromEngine] = []
        for place, token in enumerate(tokens):
            fields: dict[str, Any] = {"finish_reason": "length"} if place == len(tokens) - 1 else {}
            if params.logprobs is not None:
                fields["logprobs"] = [PositionLogprobs(token_ids=[token], logprobs=[-place / 8], rank=1)]
            steps.append(step(output("r", token, **fields)))
        singly = read(params, [each.outputs.outputs for each in steps if isinstance(each, StepReply)])
        cut = chance.randint(0, len(steps))
        handfuls = [*coalesce(steps[:cut]), *coalesce(steps[cut:])]
        assert read(params, [each.outputs.outputs for each in handfuls if isinstance(each, StepReply)]) == singly
        ended_by_text += singly[3][0] != "length"
    assert bool(ended_by_text) == any(word in asked for word in ("stop", "repetition", "logprobs", "interval"))
