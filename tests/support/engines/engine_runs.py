"""Run an engine until it is idle, checking its accounting at every step, or through the turns of an agent."""

from __future__ import annotations

import random
from dataclasses import dataclass

from pagoda.common.engine.core import EngineCore
from pagoda.common.engine.messages import EngineOutput, EngineRequest
from pagoda.common.engine.sampling.rules import SamplingRules


def drain(core: EngineCore) -> dict[str, list[EngineOutput]]:
    """Return the outputs of each request."""
    outputs: dict[str, list[EngineOutput]] = {}
    while core.has_work:
        for output in core.step().outputs:
            outputs.setdefault(output.request_id, []).append(output)
        core.check_integrity()
    return outputs


def new_tokens(outputs: list[EngineOutput]) -> list[int]:
    return [token for output in outputs for token in output.new_token_ids]


def drained_tokens(core: EngineCore) -> dict[str, list[int]]:
    """Return the generated tokens of each request."""
    return {name: new_tokens(outputs) for name, outputs in drain(core).items()}


@dataclass(frozen=True, kw_only=True)
class AgentTrace:
    """A conversation of an agent: a long prompt, then turns that each add an answer and what a tool returned.

    Numbers of tokens. `generation_prompt`: ends each prompt and is not in the next one.
    """

    vocab: int
    system: int = 600
    answer: int = 40
    tool_result: int = 160
    generation_prompt: int = 0
    turns: int = 12
    seed: int = 0


@dataclass
class TraceRun:
    """What a trace got: the greedy answers, and how many tokens of the prompts were in the prefix cache."""

    answers: list[list[int]]
    prompt_tokens: int = 0
    cached_tokens: int = 0

    @property
    def share(self) -> float:
        return self.cached_tokens / self.prompt_tokens


def run_trace(core: EngineCore, trace: AgentTrace) -> TraceRun:
    """Run the turns one after the other."""
    draw = random.Random(trace.seed)

    def tokens(count: int) -> list[int]:
        return [draw.randrange(trace.vocab) for _ in range(count)]

    run = TraceRun([])
    history = tokens(trace.system)
    for turn in range(trace.turns):
        prompt = history + tokens(trace.generation_prompt)
        request = EngineRequest(
            request_id=f"{trace.seed}-{turn}",
            prompt_token_ids=prompt,
            rules=SamplingRules(),
            max_tokens=trace.answer,
            stable_tokens=len(history) if trace.generation_prompt else None,
        )
        core.add_request(request)
        answer: list[int] = []
        run.prompt_tokens += len(prompt)
        while core.has_work:
            for output in core.step().outputs:
                run.cached_tokens += 0 if answer else output.num_cached_tokens
                answer += output.new_token_ids
        run.answers.append(answer)
        history += answer + tokens(trace.tool_result)
    return run
