"""Steps that waited to be heard are handed on as one: what they brought each sequence, in one output.

Where the engine is faster than this process, an event for each token costs more time than there is, and clients would
hear later and later. A backlog that is joined before anything is made of it costs hardly more than a single step, so it
does not grow. An engine that is slower never has two steps waiting, and nothing is joined.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from pagoda.common.engine.messages import EngineOutput, StepOutputs
from pagoda.server.wire import FromEngine, Step


def joined(messages: Sequence[FromEngine]) -> list[FromEngine]:
    """Messages in order, each run of steps in one."""
    told: list[FromEngine] = []
    waiting: list[StepOutputs] = []
    for message in messages:
        if isinstance(message, Step) and not any(output.error for output in message.outputs.outputs):
            waiting.append(message.outputs)
            continue
        # An error goes by itself: it ends a request at once, and what was said before it is to be heard before it.
        told += [*_one(waiting), message]
        waiting = []
    return told + _one(waiting)


def _one(steps: list[StepOutputs]) -> list[FromEngine]:
    """At most one message, of all these steps."""
    if len(steps) < 2:
        return [Step(step) for step in steps]
    news: defaultdict[str, list[EngineOutput]] = defaultdict(list)
    for step in steps:
        for output in step.outputs:
            news[output.request_id].append(output)
    outputs = [outputs[0] if len(outputs) == 1 else _joined_outputs(outputs) for outputs in news.values()]
    earlier = tuple(stats for step in steps[:-1] for stats in (*step.earlier, step.stats))
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
        scheduled=first.scheduled,
        num_preemptions=max(output.num_preemptions for output in outputs),
    )
