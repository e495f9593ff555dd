"""Operation counts of the host path: scheduling, preparing requests, reading the engine's outputs, detokenising."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import partial

from performance.operations import counted
from support.checkpoints.byte_text import byte_tokenizer
from support.engines.fake_engine import build

from pagoda.benchmarks.cpu.scheduler_cost import make_scheduler, result_of
from pagoda.common.config.engine import EngineConfig
from pagoda.common.config.groups.model import ModelConfig
from pagoda.common.engine.messages import EngineOutput
from pagoda.common.sampling_params import RequestOutputKind, SamplingParams
from pagoda.common.text.tokenizer import Detokenizer
from pagoda.server.processing.inputs import InputProcessor
from pagoda.server.processing.output_processor import OutputProcessor

STEPS = 16
"""Steps that are counted: as many as a block of the KV cache has tokens."""
TEXT = "The quick brown fox jumps over the lazy dog. "


def environment() -> dict[str, str]:
    """The interpreter, each minor version of which has other instructions."""
    return {"python": "{}.{}".format(*sys.version_info)}


def measure() -> Mapping[str, float]:
    """Bytecode instructions: of decode steps per sequence, of anything else per request or token."""
    return {
        **_scheduling(64, 0),
        **_scheduling(256, 0),
        **_scheduling(64, 3),
        "admitting 64 requests, per request": _admitting(64),
        **_processing(),
        **_detokenizing(),
    }


def _scheduling(running: int, drafts: int) -> dict[str, float]:
    """Of steps in which every sequence decodes and none ends."""
    scheduler = make_scheduler(running, drafts)
    schedule = update = 0
    for step in range(2 * STEPS):
        planning, plan = counted(scheduler.schedule)
        assert plan is not None
        updating, _ = counted(partial(scheduler.update, plan, result_of(plan)))
        if step >= STEPS:
            assert plan.num_seqs == running
            schedule, update = schedule + planning, update + updating
    how = f"{running} running" + (f", {drafts} drafts each" if drafts else "")
    counts = {"schedule": schedule, "update": update}
    return {f"{name}, {how}, per sequence": count / STEPS / running for name, count in counts.items()}


def _admitting(requests: int) -> float:
    """Of the first step, which plans their prompts."""
    make_scheduler(requests, 0).schedule()  # what the first call does once
    return counted(make_scheduler(requests, 0).schedule)[0] / requests


def _processing() -> dict[str, float]:
    """Of one request: what is done with it before the engine gets it, and with one of its tokens."""
    tokenizer, config = byte_tokenizer(), ModelConfig(model="fake")
    inputs = InputProcessor(config, build(EngineConfig(model=config)).info, tokenizer)
    params = SamplingParams(temperature=0.7, top_p=0.9, stop=["###"], max_tokens=50)
    params.output_kind = RequestOutputKind.DELTA
    inputs.prepare("first", TEXT, params)
    preparing, _ = counted(partial(inputs.prepare, "counted", TEXT, params))
    requests, tokens = 64, 16
    outputs = OutputProcessor(tokenizer)
    for number in range(requests):
        outputs.add(inputs.prepare(str(number), TEXT, params))
    step = [EngineOutput(request_id=str(number), new_token_ids=[97]) for number in range(requests)]
    outputs.process(step)
    reading = sum(counted(partial(outputs.process, step))[0] for _ in range(tokens))
    return {
        "preparing a request": preparing,
        "reading an output of the engine, per token": reading / tokens / requests,
    }


def _detokenizing() -> dict[str, float]:
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    counts = {}
    for name, stop in {"detokenising": [], "detokenising with stop strings": ["lazy cat", "###"]}.items():
        Detokenizer(tokenizer, [], stop=stop).append(ids)
        text = Detokenizer(tokenizer, [], stop=stop)
        counts[f"{name}, per token"] = sum(counted(partial(text.append, [token]))[0] for token in ids) / len(ids)
    return counts
