"""What callers read of a request, from engine outputs to text: kinds of output, n completions, stops, aborts."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.checkpoints.byte_text import EOS, byte_tokenizer

from pagoda.common.engine.messages import EngineOutput, EngineRequest, PositionLogprobs
from pagoda.common.engine.pooling.values import Pooled
from pagoda.common.engine.sampling.rules import SamplingRules
from pagoda.common.errors import RequestError
from pagoda.common.pooling_params import PoolingParams
from pagoda.common.sampling_params import RepetitionDetectionParams, RequestOutputKind, SamplingParams
from pagoda.server.outputs import Logprob, RequestOutput
from pagoda.server.processing.inputs import PreparedRequest, Prompt
from pagoda.server.processing.output_processor import OutputProcessor

TEXT = byte_tokenizer()
CUMULATIVE, DELTA, FINAL = RequestOutputKind.CUMULATIVE, RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY


def prepared(request_id: str = "r", n: int = 1, **params: Any) -> PreparedRequest:
    names = [request_id] if n == 1 else [f"{index}_{request_id}" for index in range(n)]
    children = [
        EngineRequest(request_id=name, prompt_token_ids=[1, 2], rules=SamplingRules(), max_tokens=50) for name in names
    ]
    return PreparedRequest(request_id, Prompt("p", [1, 2]), SamplingParams(n=n, **params), children, 5.0, 6.0)


def sequences(made: OutputProcessor) -> int:
    return len(made._sequences) + len(made._pooling)


def processor(*requests: PreparedRequest, interval: int | None = None, tokenizer: Any = TEXT) -> OutputProcessor:
    made = OutputProcessor(tokenizer) if interval is None else OutputProcessor(tokenizer, interval)
    for request in requests:
        made.add(request)
    return made


def says(text: str, name: str = "r", **fields: Any) -> EngineOutput:
    return EngineOutput(request_id=name, new_token_ids=list(text.encode()), **fields)


def texts(outputs: list[Any]) -> list[list[tuple[int, str, str | None]]]:
    """Index, text and finish reason of each completion in each output."""
    return [[(each.index, each.text, each.finish_reason) for each in output.outputs] for output in outputs]


def read(made: OutputProcessor, *outputs: EngineOutput) -> list[list[tuple[int, str, str | None]]]:
    return texts(made.process(outputs)[0])


def test_who_waits_is_listed_by_owner_in_the_order_of_service() -> None:
    def of(request_id: str, owner: str, group: str = "", priority: int = 0) -> PreparedRequest:
        request = prepared(request_id)
        fields = {"owner": owner, "group": group, "priority": priority}
        return replace(request, children=[replace(child, **fields) for child in request.children])

    made = processor(
        of("late", "x", priority=1),
        of("runs", "x"),
        of("a-0", "x", "a"),
        of("b-0", "x", "b"),
        of("c", "y"),
        of("a-1", "x", "a"),
        of("b-1", "x", "b"),
    )
    made.process([says("a", "runs"), says("a", "b-1")])
    assert made.waiting() == {"x": [["a-0", "a-1"], ["late"]], "y": [["c"]]}


class TestKinds:
    def test_deltas_have_what_is_new(self) -> None:
        made = processor(prepared(output_kind=DELTA))
        assert read(made, says("a")) == [[(0, "a", None)]]
        assert read(made, says("bc", finish_reason="length")) == [[(0, "bc", "length")]]

    def test_cumulative_outputs_have_everything(self) -> None:
        made = processor(prepared(output_kind=CUMULATIVE))
        assert read(made, says("a")) == [[(0, "a", None)]]
        ready, _ = made.process([says("bc", finish_reason="length")])
        assert texts(ready) == [[(0, "abc", "length")]]
        assert ready[0].outputs[0].token_ids == list(b"abc")

    @pytest.mark.parametrize("stop", [{}, {"stop": ["zz"]}])
    def test_final_outputs_come_at_the_end(self, stop: dict[str, Any]) -> None:
        """Without stop strings the text is decoded at once, at the end."""
        made = processor(prepared(output_kind=FINAL, **stop))
        assert read(made, says("a")) == []
        (ready,), _ = made.process([says("b", finish_reason="length")])
        assert texts([ready]) == [[(0, "ab", "length")]]
        assert (ready.outputs[0].token_ids, ready.finished) == (list(b"ab"), True)

    @pytest.mark.parametrize("kind", [DELTA, CUMULATIVE, FINAL])
    def test_the_text_ends_before_the_stop_token(self, kind: RequestOutputKind) -> None:
        made = processor(prepared(output_kind=kind))
        last = EngineOutput(request_id="r", new_token_ids=[97, 98], finish_reason="stop", stop_reason=98)
        (ready,), stopped = made.process([last])
        assert texts([ready]) == [[(0, "a", "stop")]]
        assert (ready.outputs[0].token_ids, ready.outputs[0].stop_reason, stopped) == ([97, 98], 98, [])

    def test_the_stop_token_is_kept_on_request(self) -> None:
        made = processor(prepared(include_stop_str_in_output=True))
        assert read(made, says("ab", finish_reason="stop")) == [[(0, "ab", "stop")]]

    def test_at_max_tokens_the_whole_text_is_shown(self) -> None:
        assert read(processor(prepared()), says("ab", finish_reason="length")) == [[(0, "ab", "length")]]

    def test_special_tokens_are_skipped_unless_asked_for(self) -> None:
        end = EngineOutput(request_id="r", new_token_ids=[97, EOS], finish_reason="length")
        assert read(processor(prepared()), end) == [[(0, "a", "length")]]
        assert read(processor(prepared(skip_special_tokens=False)), end) == [[(0, "a<eos>", "length")]]

    @pytest.mark.parametrize(("tokenizer", "params"), [(None, {}), (TEXT, {"detokenize": False})])
    def test_without_detokenization_there_are_only_tokens(self, tokenizer: Any, params: dict[str, Any]) -> None:
        made = processor(prepared(output_kind=CUMULATIVE, logprobs=0, **params), tokenizer=tokenizer)
        (ready,), _ = made.process([says("a", logprobs=[position(97)], finish_reason="stop")])
        assert (ready.outputs[0].text, ready.outputs[0].token_ids) == ("", [97])
        assert ready.outputs[0].logprobs == [{97: Logprob(-0.5, 1, None)}]
        assert made.process([]) == ([], [])

    def test_the_kind_of_add_overrides_that_of_the_params(self) -> None:
        made = processor()
        made.add(prepared(output_kind=CUMULATIVE), FINAL)
        assert read(made, says("a")) == []


class TestCompletions:
    def test_each_has_its_index_and_the_last_finishes_the_request(self) -> None:
        made = processor(prepared(n=2, output_kind=DELTA))
        ready, _ = made.process([says("a", "0_r"), says("x", "1_r", finish_reason="length")])
        assert texts(ready) == [[(0, "a", None)], [(1, "x", "length")]]
        assert [each.finished for each in ready] == [False, False]
        assert (sequences(made), len(made), made.request_ids) == (1, 1, ["r"])
        (ready,), _ = made.process([says("b", "0_r", finish_reason="stop", stop_reason=98)])
        assert ready.finished
        assert (sequences(made), len(made), made.request_ids) == (0, 0, [])

    def test_final_outputs_hold_all_of_them_at_the_end(self) -> None:
        made = processor(prepared(n=2, output_kind=FINAL))
        assert read(made, says("a", "0_r", finish_reason="length"), says("x", "1_r")) == []
        assert read(made, says("y", "1_r", finish_reason="length")) == [[(0, "a", "length"), (1, "xy", "length")]]

    def test_outputs_of_unknown_requests_are_dropped(self) -> None:
        made = processor(prepared())
        assert read(made, says("a", "other"), says("b")) == [[(0, "b", None)]]
        assert made.process([EngineOutput(request_id="other", new_token_ids=[], pooled=Pooled.of(np.ones(2)))])[0] == []

    def test_what_the_output_says_of_the_request(self) -> None:
        made = processor(prepared(output_kind=DELTA))
        (ready,), _ = made.process([says("a", num_cached_tokens=4)])
        assert isinstance(ready, RequestOutput)
        assert (ready.request_id, ready.prompt, ready.prompt_token_ids) == ("r", "p", [1, 2])
        assert (ready.num_cached_tokens, ready.finished) == (4, False)

    def test_ids_in_use_are_refused(self) -> None:
        made = processor(prepared("r", n=2))
        for request in (prepared("r"), prepared("1_r"), prepared("0_r")):
            with pytest.raises(RequestError, match="is in use"):
                made.add(request)
        made.add(prepared("2_r"))
        assert "r" in made
        assert "0_r" not in made
        assert made.parent_of("1_r") == "r"
        assert made.parent_of("2_r") == "2_r"
        assert made.parent_of("r") is None

    def test_a_dropped_request_is_forgotten(self) -> None:
        made = processor(prepared(n=2))
        made.drop("r")
        made.drop("unknown")
        assert (len(made), sequences(made)) == (0, 0)
        assert read(made, says("a", "0_r")) == []


class TestAbort:
    def test_deltas_end_with_what_is_pending(self) -> None:
        made = processor(prepared(output_kind=DELTA, stop=["xyz"]))
        assert read(made, says("axy")) == [[(0, "a", None)]]
        ended, children = made.abort(["unknown", "r"])
        assert (texts(ended), children) == ([[(0, "xy", "abort")]], ["r"])
        assert (ended[0].finished, ended[0].outputs[0].token_ids) == (True, [])
        assert made.abort(["r"]) == ([], [])

    @pytest.mark.parametrize("stop", [{}, {"stop": ["xyz"]}])
    def test_a_final_output_has_the_text_so_far(self, stop: dict[str, Any]) -> None:
        made = processor(prepared(output_kind=FINAL, **stop))
        made.process([says("ax")])
        assert texts(made.abort(["r"])[0]) == [[(0, "ax", "abort")]]

    def test_a_final_output_includes_the_completions_that_were_finished(self) -> None:
        made = processor(prepared(n=3, output_kind=FINAL))
        made.process([says("a", "0_r"), says("x", "1_r", finish_reason="length"), says("k", "2_r")])
        ended, children = made.abort(["r"])
        assert texts(ended) == [[(0, "a", "abort"), (1, "x", "length"), (2, "k", "abort")]]
        assert (children, ended[0].finished) == (["0_r", "2_r"], True)
        assert (len(made), sequences(made)) == (0, 0)

    def test_deltas_leave_out_the_completions_that_were_finished(self) -> None:
        made = processor(prepared(n=2, output_kind=DELTA))
        made.process([says("a", "0_r"), says("x", "1_r", finish_reason="length")])
        ended, children = made.abort(["r"])
        assert (texts(ended), children) == ([[(0, "", "abort")]], ["0_r"])

    def test_tokens_kept_back_by_the_interval_are_in_the_last_output(self) -> None:
        made = processor(prepared(output_kind=DELTA), interval=5)
        assert read(made, says("a")) == [[(0, "a", None)]]
        assert read(made, says("b")) == []
        (ended,), _ = made.abort(["r"])
        assert texts([ended]) == [[(0, "b", "abort")]]
        assert ended.outputs[0].token_ids == [98]

    def test_without_a_tokenizer(self) -> None:
        made = processor(prepared(output_kind=CUMULATIVE), tokenizer=None)
        made.process([says("a")])
        (ended,), _ = made.abort(["r"])
        assert (ended.outputs[0].token_ids, ended.outputs[0].finish_reason) == ([97], "abort")


class TestIntervals:
    @pytest.mark.parametrize(
        ("params", "interval"), [({}, 3), ({"stream_interval": 3}, 1), ({"stream_interval": 3}, 9)]
    )
    def test_the_first_every_third_and_the_last(self, params: dict[str, Any], interval: int) -> None:
        made = processor(prepared(output_kind=DELTA, **params), interval=interval)
        ready = [read(made, says(letter)) for letter in "abcdefg"]
        assert ready == [[[(0, "a", None)]], [], [], [[(0, "bcd", None)]], [], [], [[(0, "efg", None)]]]
        assert read(made, says("h"), says("i", finish_reason="length")) == [[(0, "hi", "length")]]

    def test_the_default_is_every_token(self) -> None:
        made = processor(prepared(output_kind=DELTA))
        assert [read(made, says(letter)) for letter in "abc"] == [[[(0, letter, None)]] for letter in "abc"]

    def test_cumulative_outputs_wait_too(self) -> None:
        made = processor(prepared(output_kind=CUMULATIVE), interval=2)
        assert [read(made, says(letter)) for letter in "abc"] == [[[(0, "a", None)]], [], [[(0, "abc", None)]]]

    def test_logprobs_wait_with_their_tokens(self) -> None:
        made = processor(prepared(output_kind=DELTA, logprobs=0), interval=2)
        shown = []
        for letter in "abcd":
            ready, _ = made.process([says(letter, logprobs=[position(ord(letter))])])
            shown += [[list(each) for each in output.outputs[0].logprobs] for output in ready]
        assert shown == [[[97]], [[98], [99]]]


class TestStops:
    def test_a_stop_string_ends_the_sequence_in_the_engine_too(self) -> None:
        made = processor(prepared(output_kind=DELTA, stop=["bc"]))
        assert read(made, says("ab")) == [[(0, "a", None)]]
        (ready,), stopped = made.process([says("c")])
        assert (texts([ready]), stopped) == ([[(0, "", "stop")]], ["r"])
        assert (ready.outputs[0].stop_reason, ready.finished) == ("bc", True)
        assert made.process([says("d")]) == ([], [])

    def test_one_that_ends_with_the_sequence_is_its_stop_reason(self) -> None:
        made = processor(prepared(output_kind=DELTA, stop=["c"]))
        (ready,), stopped = made.process([says("ac", finish_reason="length")])
        assert (texts([ready]), stopped) == ([[(0, "a", "stop")]], [])
        assert ready.outputs[0].stop_reason == "c"

    @pytest.mark.parametrize("kind", [DELTA, FINAL])
    def test_tokens_after_it_are_dropped(self, kind: RequestOutputKind) -> None:
        made = processor(prepared(output_kind=kind, stop=["b"], logprobs=0))
        many = says("abcd", logprobs=[position(token, -token / 4) for token in b"abcd"])
        (ready,), stopped = made.process([many])
        (answer,) = ready.outputs
        assert (answer.text, answer.token_ids, stopped) == ("a", [97, 98], ["r"])
        assert [list(each) for each in answer.logprobs or []] == [[97], [98]]
        assert answer.cumulative_logprob == -(97 + 98) / 4
        assert ready.metrics is not None
        assert ready.metrics.num_generation_tokens == 2

    def test_of_two_tokens_the_second_is_dropped(self) -> None:
        made = processor(prepared(output_kind=DELTA, stop=["a"]))
        (ready,), _ = made.process([says("ab")])
        assert (ready.outputs[0].text, ready.outputs[0].token_ids) == ("", [97])

    def test_deltas_of_several_tokens_have_all_of_them(self) -> None:
        made = processor(prepared(output_kind=DELTA, stop=["zz"]))
        (ready,), _ = made.process([says("abc")])
        assert (ready.outputs[0].text, ready.outputs[0].token_ids) == ("abc", [97, 98, 99])
        (ready,), _ = made.process([says("de")])
        assert (ready.outputs[0].text, ready.outputs[0].token_ids) == ("de", [100, 101])

    def test_a_repetition_ends_the_sequence(self) -> None:
        detection = RepetitionDetectionParams(max_pattern_size=2, min_count=3)
        made = processor(prepared(output_kind=DELTA, repetition_detection=detection))
        assert read(made, says("abab")) == [[(0, "abab", None)]]
        (ready,), stopped = made.process([says("abxx")])
        assert (texts([ready]), stopped) == ([[(0, "ab", "repetition")]], ["r"])
        assert ready.outputs[0].stop_reason == "repetition_detected"

    def test_a_repetition_counts_from_min_tokens_on(self) -> None:
        detection = RepetitionDetectionParams(max_pattern_size=1, min_count=2)
        made = processor(prepared(output_kind=DELTA, repetition_detection=detection, min_tokens=4))
        assert read(made, says("aaa")) == [[(0, "aaa", None)]]
        assert read(made, says("a")) == [[(0, "a", "repetition")]]

    def test_a_repetition_at_the_end_does_not_hide_why_it_ended(self) -> None:
        detection = RepetitionDetectionParams(max_pattern_size=1, min_count=2)
        made = processor(prepared(output_kind=DELTA, repetition_detection=detection))
        (ready,), stopped = made.process([says("aa", finish_reason="length")])
        assert (texts([ready]), stopped) == ([[(0, "aa", "length")]], [])

    def test_an_engine_error_is_the_stop_reason(self) -> None:
        (ready,), _ = processor(prepared()).process([says("a", finish_reason="error", error=("field", "why"))])
        assert (ready.outputs[0].finish_reason, ready.outputs[0].stop_reason) == ("error", "why")


def position(token: int, logprob: float = -0.5, *others: tuple[int, float], **fields: Any) -> PositionLogprobs:
    return PositionLogprobs(
        token_ids=[token, *(each for each, _ in others)],
        logprobs=[logprob, *(each for _, each in others)],
        **({"rank": 1} | fields),
    )


class TestLogprobs:
    def test_the_chosen_token_comes_first_and_once(self) -> None:
        made = processor(prepared(output_kind=DELTA, logprobs=2))
        entry = position(99, -2.0, (97, -0.5), (99, -2.0), rank=2)
        (ready,), _ = made.process([says("c", logprobs=[entry])])
        assert ready.outputs[0].logprobs == [{99: Logprob(-2.0, 2, "c"), 97: Logprob(-0.5, 1, "a")}]
        assert list(ready.outputs[0].logprobs[0]) == [99, 97]
        assert ready.outputs[0].cumulative_logprob == -2.0

    def test_candidates_have_the_ranks_of_the_engine_if_it_gives_any(self) -> None:
        made = processor(prepared(output_kind=DELTA, logprobs=2))
        entry = position(99, -2.0, (97, -0.5), (98, -9.0), rank=4, ranks=[1, 7])
        (ready,), _ = made.process([says("c", logprobs=[entry])])
        assert [each.rank for each in ready.outputs[0].logprobs[0].values()] == [4, 1, 7]

    def test_deltas_have_those_of_their_tokens_and_whole_outputs_have_all(self) -> None:
        for kind, want in ((DELTA, [[97], [98]]), (CUMULATIVE, [[97], [97, 98]])):
            made = processor(prepared(output_kind=kind, logprobs=0))
            shown, sums = [], []
            for letter in "ab":
                (ready,), _ = made.process([says(letter, logprobs=[position(ord(letter), -1.0)])])
                shown.append([token for each in ready.outputs[0].logprobs for token in each])
                sums.append(ready.outputs[0].cumulative_logprob)
            assert (shown, sums) == (want, [-1.0, -2.0])

    def test_of_several_tokens_that_are_searched_for_stops(self) -> None:
        made = processor(prepared(output_kind=DELTA, logprobs=0, stop=["zz"]))
        (ready,), _ = made.process([says("abc", logprobs=[position(token) for token in b"abc"])])
        assert [list(each) for each in ready.outputs[0].logprobs] == [[97], [98], [99]]

    def test_without_logprobs_there_are_none(self) -> None:
        (ready,), _ = processor(prepared()).process([says("a", logprobs=[position(97)])])
        assert (ready.outputs[0].logprobs, ready.outputs[0].cumulative_logprob) == (None, None)

    def test_a_delta_without_tokens_has_none(self) -> None:
        made = processor(prepared(output_kind=DELTA, logprobs=0))
        made.process([says("a", logprobs=[position(97)])])
        (ended,), _ = made.abort(["r"])
        assert ended.outputs[0].logprobs == []

    @pytest.mark.parametrize(("kind", "again"), [(DELTA, False), (CUMULATIVE, True)])
    def test_prompt_logprobs_come_with_the_first_output(self, kind: RequestOutputKind, again: bool) -> None:
        made = processor(prepared(n=2, output_kind=kind, prompt_logprobs=0))
        first = says("a", "0_r", prompt_logprobs=[position(2, -0.25, rank=3)])
        second = says("x", "1_r", prompt_logprobs=[position(2, -7.0)])
        ready, _ = made.process([first, second])
        want = [None, {2: Logprob(-0.25, 3, "\x02")}]
        assert [each.prompt_logprobs for each in ready] == [want, want if again else None]

    def test_prompt_logprobs_of_one_completion(self) -> None:
        made = processor(prepared(output_kind=FINAL, prompt_logprobs=0))
        made.process([says("a", prompt_logprobs=[position(2, -0.25, rank=3)])])
        (ready,), _ = made.process([says("b", finish_reason="length")])
        assert ready.prompt_logprobs == [None, {2: Logprob(-0.25, 3, "\x02")}]


class TestMetrics:
    def test_times_and_counts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        now = [10.0]
        monkeypatch.setattr(time, "monotonic", lambda: now[0])
        made = processor(prepared(output_kind=DELTA, stop=["z"]))
        now[0] = 12.0
        (ready,), _ = made.process([says("a", scheduled=11.0, num_cached_tokens=1)])
        metrics = ready.metrics
        assert metrics is not None
        now[0] = 13.0
        made.process([EngineOutput(request_id="r", new_token_ids=[], num_preemptions=2)])
        (answer,) = metrics.answers
        assert (answer.first_token_ts, answer.last_token_ts, answer.is_complete) == (12.0, 12.0, False)
        now[0] = 14.0
        made.process([says("bzc")])
        assert (metrics.arrival_time, metrics.arrival_ts, metrics.queued_ts) == (5.0, 6.0, 10.0)
        assert (answer.scheduled_ts, answer.first_token_ts, answer.last_token_ts) == (11.0, 12.0, 14.0)
        assert (answer.num_generation_tokens, answer.num_cached_tokens) == (3, 1)
        assert (answer.num_preemptions, answer.is_complete) == (2, True)

    def test_cached_tokens_of_the_request_are_those_of_its_first_sequence(self) -> None:
        made = processor(prepared(n=2, output_kind=DELTA))
        ready, _ = made.process([says("a", "1_r", num_cached_tokens=0), says("b", "0_r", num_cached_tokens=4)])
        assert [each.num_cached_tokens for each in ready] == [0, 0]
        assert [each.num_cached_tokens for each in ready[0].metrics.answers] == [4, 0]


class TestPooling:
    def prepared(self, request_id: str = "e") -> PreparedRequest:
        child = EngineRequest(request_id=request_id, prompt_token_ids=[1, 2], rules=SamplingRules(), max_tokens=0)
        return PreparedRequest(request_id, Prompt(None, [1, 2]), PoolingParams(), [child], 5.0, 6.0)

    def test_the_only_output(self, monkeypatch: pytest.MonkeyPatch) -> None:
        made = processor(self.prepared())
        assert (len(made), sequences(made), made.request_ids, "e" in made) == (1, 1, ["e"], True)
        assert made.parent_of("e") == "e"
        with pytest.raises(RequestError, match="is in use"):
            made.add(self.prepared())
        monkeypatch.setattr(time, "monotonic", lambda: 9.0)
        vector = np.array([1.0, 2.0], np.float32)
        pooled = EngineOutput(
            request_id="e",
            new_token_ids=[],
            finish_reason="stop",
            pooled=Pooled.of(vector),
            num_cached_tokens=3,
            scheduled=8.0,
        )
        (ready,), stopped = made.process([pooled])
        assert (ready.request_id, ready.prompt_token_ids, ready.num_cached_tokens) == ("e", [1, 2], 3)
        assert (ready.scheduled_ts, ready.finished_ts, stopped) == (8.0, 9.0, [])
        np.testing.assert_array_equal(ready.outputs.data, vector)
        assert len(made) == sequences(made) == 0

    def test_an_output_without_numbers_is_none(self) -> None:
        made = processor(self.prepared())
        assert made.process([EngineOutput(request_id="e", new_token_ids=[])]) == ([], [])
        assert len(made) == 1

    def test_abort_and_drop(self) -> None:
        made = processor(self.prepared("e"), self.prepared("f"), prepared("r", output_kind=DELTA))
        ended, children = made.abort(["e", "r", "e"])
        assert (texts(ended), children) == ([[(0, "", "abort")]], ["e", "r"])
        made.drop("f")
        assert len(made) == 0
