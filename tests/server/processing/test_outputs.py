from pagoda.server.outputs import AnswerMetrics, CompletionOutput, Logprob, RequestMetrics, RequestOutput


def output(index: int, text: str, ids: list[int], **fields: object) -> CompletionOutput:
    return CompletionOutput(index=index, text=text, token_ids=ids, **fields)


def test_deltas_are_joined() -> None:
    first = RequestOutput("r", "p", [1], outputs=[output(0, "ab", [1, 2], logprobs=[{1: Logprob(-1.0)}])])
    kept = first.outputs[0].token_ids
    later = output(0, "c", [3], logprobs=[{3: Logprob(-2.0)}], cumulative_logprob=-3.0, finish_reason="stop")
    first.add(RequestOutput("r", "p", [1], outputs=[later, output(1, "x", [9])], finished=True), aggregate=True)
    assert [o.text for o in first.outputs] == ["abc", "x"]
    assert first.outputs[0].token_ids == [1, 2, 3]
    assert kept == [1, 2]
    assert [list(p) for p in first.outputs[0].logprobs] == [[1], [3]]
    assert (first.finished, first.outputs[0].finish_reason, first.outputs[0].cumulative_logprob) == (True, "stop", -3.0)
    assert first.outputs[0].finished()


def test_cumulative_outputs_replace() -> None:
    first = RequestOutput("r", "p", [1], outputs=[output(0, "a", [1])])
    first.add(RequestOutput("r", "p", [1], outputs=[output(0, "ab", [1, 2])]), aggregate=False)
    assert first.outputs == [output(0, "ab", [1, 2])]
    assert not first.finished


def test_prompt_logprobs_of_an_earlier_delta_survive() -> None:
    first = RequestOutput("r", "p", [1, 2], prompt_logprobs=[None, {2: Logprob(-0.5, 1)}], num_cached_tokens=4)
    first.add(RequestOutput("r", "p", [1, 2]), aggregate=True)
    assert first.prompt_logprobs == [None, {2: Logprob(-0.5, 1)}]
    assert first.num_cached_tokens == 4


def test_repr_reads_like_a_constructor() -> None:
    shown = repr(RequestOutput("7", "hi", [1], outputs=[output(0, "a", [5])], finished=True))
    assert shown.startswith("RequestOutput(request_id='7', prompt='hi', prompt_token_ids=[1], ")
    assert "outputs=[CompletionOutput(index=0, text='a', token_ids=[5], " in shown


def test_first_token_latency() -> None:
    metrics = RequestMetrics(arrival_ts=2.0, answers=[AnswerMetrics()])
    assert metrics.first_token_latency == 0.0
    metrics.first_token_ts = 2.5
    assert metrics.first_token_latency == 0.5
