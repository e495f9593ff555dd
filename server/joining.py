"""Steps that waited to be heard are handed on as one: what they brought each sequence, in one output.

Where the engine is faster than this process, an event for each token costs more time than there is, and clients would
hear later and later. A backlog that is joined before anything is made of it costs hardly more than a single step, so it
does not grow. An engine that is slower never has two steps waiting, and nothing is joined.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import chain, groupby

from pagoda.common.engine.messages import EngineOutput, StepOutputs
from pagoda.server.wire import FromEngine, Step


def joined(messages: Sequence[FromEngine]) -> Iterable[FromEngine]:
    """Messages in order, each run of steps in one."""
    if len(messages) < 2:
        return messages
    runs = (list(run) for _, run in groupby(messages, _can_be_joined))
    return chain.from_iterable(map(_joined_run, runs))


def _can_be_joined(message: FromEngine) -> bool:
    """An error goes by itself: what was said before it is said, then it ends the request."""
    return isinstance(message, Step) and not any(output.error for output in message.outputs.outputs)


def _joined_run(run: list[FromEngine]) -> list[FromEngine]:
    steps = [message.outputs for message in run if isinstance(message, Step)]
    if len(run) == 1 or not _can_be_joined(run[0]):
        return run
    news: defaultdict[str, list[EngineOutput]] = defaultdict(list)
    for step in steps:
        for output in step.outputs:
            news[output.request_id].append(output)
    earlier = tuple(stats for step in steps[:-1] for stats in (*step.earlier, step.stats))
    outputs = [outputs[0] if len(outputs) == 1 else _joined_outputs(outputs) for outputs in news.values()]
    return [Step(StepOutputs(outputs=outputs, stats=steps[-1].stats, earlier=earlier))]


def _joined_outputs(outputs: list[EngineOutput]) -> EngineOutput:
    """Of one sequence: what comes with the first output, what comes with the last, and all tokens."""
    first, last = outputs[0], outputs[-1]
    logprobs = None
    if first.logprobs is not None:
        logprobs = [position for output in outputs for position in output.logprobs or ()]
    return EngineOutput(
        request_id=first.request_id,
        new_token_ids=[token for output in outputs for token in output.new_token_ids],
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        logprobs=logprobs,
        prompt_logprobs=first.prompt_logprobs,
        num_cached_tokens=first.num_cached_tokens,
    )
