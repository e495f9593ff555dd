"""Time of an engine step with 64 guided requests: with a real model, and with a device of a fixed step time.

usage: python guided_steps.py MODEL [--requests 64] [--tokens 100] [--forward-ms 5 10 20] [--model-tokens 30]

Every request fills the same endless JSON schema with random tokens. First without a model: a thread that sleeps
for the time of a forward pass and then samples at random stands for the device, so that what lengthens a step is the
host's work that the device waits for. Then with the model on the CPU (0 tokens: not at all). Prints one JSON line each.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from pagoda import LLM, SamplingParams
from pagoda.common.backend import Capabilities
from pagoda.common.config.engine import Limits
from pagoda.common.engine.core import EngineCore, generation_core
from pagoda.common.engine.kv_cache.spec import KvGroup, KvLayout
from pagoda.common.engine.messages import EngineRequest
from pagoda.common.engine.sampling.rules import SamplingRules
from pagoda.common.engine.steps.contract import StepPlan, StepResult, TokenMasks, UInt32
from pagoda.common.engine.structured_output.compiler import Structured
from pagoda.common.engine.structured_output.grammar import Grammar, vocabulary_of
from pagoda.common.engine.structured_output.guidance import guidance_text
from pagoda.common.models.mixers.caches import FullCache
from pagoda.common.sampling_params import StructuredOutputsParams

BLOCKS, BLOCK_SIZE, WARM_STEPS = 5000, 16, 10
SCHEMA = {
    "type": "array",
    "minItems": 500,
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
        "required": ["name", "age"],
    },
}


class DeviceStep:
    """A step of the device. Implements common.backend.PendingResult."""

    def __init__(self, device: SleepingDevice, plan: StepPlan) -> None:
        self.masks: Future[TokenMasks | None] = Future()
        if plan.masked is None:
            self.masks.set_result(None)
        self._result = device.worker.submit(device.run, plan, self.masks)

    def bind_masks(self, masks: TokenMasks) -> None:
        """Let the device sample."""
        self.masks.set_result(masks)

    def result(self) -> StepResult:
        """Wait for the step."""
        return self._result.result()


class SleepingDevice:
    """A device whose forward pass takes a fixed time."""

    capabilities = Capabilities("sleep", "none", BLOCK_SIZE, prefers_extents=False)

    def __init__(self, forward_ms: float) -> None:
        self.worker = ThreadPoolExecutor(1)
        self._seconds = forward_ms / 1e3
        self._draw = random.Random(0)

    def execute(self, plan: StepPlan) -> DeviceStep:
        """Queue a step."""
        return DeviceStep(self, plan)

    def run(self, plan: StepPlan, masks: Future[TokenMasks | None]) -> StepResult:
        """Sleep, then sample."""
        time.sleep(self._seconds)
        tokens = np.where(plan.samples, 7, -1).astype(np.int32)
        bound = masks.result()
        if bound is not None:
            tokens[bound.sequences] = [self._sample(bits) for bits in bound.bits]
        return StepResult(plan.step, tokens)

    def _sample(self, bits: UInt32) -> int:
        word = self._draw.choice(bits.nonzero()[0].tolist())
        value = int(bits[word])
        return 32 * word + self._draw.choice([bit for bit in range(32) if value >> bit & 1])


def engine(device: SleepingDevice, structured: Structured, requests: int) -> EngineCore:
    """Return an engine with `requests` requests."""
    layout = KvLayout((KvGroup(FullCache(3, 64), (0,)),), BLOCK_SIZE)
    limits = Limits(max_model_len=1024, max_num_batched_tokens=8192, max_num_seqs=requests, block_size=BLOCK_SIZE)
    core = generation_core(device, layout, limits, (BLOCKS,), structured=structured)
    grammar = Grammar(guidance_text(StructuredOutputsParams(json=SCHEMA), {}))
    for number in range(requests):
        core.add_request(
            EngineRequest(
                request_id=str(number),
                prompt_token_ids=[number] * 8,
                rules=SamplingRules(),
                max_tokens=1000,
                grammar=grammar,
            )
        )
    return core


def device_step(structured: Structured, requests: int, steps: int, forward_ms: float) -> dict[str, float]:
    """Return milliseconds per step of the device's engine, once all requests run."""
    device = SleepingDevice(forward_ms)
    core = engine(device, structured, requests)
    while core.stats.running < requests:
        core.step()
    for _ in range(WARM_STEPS):
        core.step()
    began, busy = time.perf_counter(), time.thread_time()
    for _ in range(steps):
        core.step()
    seconds, busy = time.perf_counter() - began, time.thread_time() - busy
    device.worker.shutdown(cancel_futures=True)
    return {
        "forward_ms": forward_ms,
        "step_ms": round(1e3 * seconds / steps, 2),
        "host_ms": round(1e3 * busy / steps, 2),
    }


def model_step(llm: LLM, requests: int, tokens: int) -> dict[str, float]:
    """Return milliseconds per token of every request, with the model."""
    form = StructuredOutputsParams(json=SCHEMA)
    params = [
        SamplingParams(max_tokens=tokens, temperature=1.0, seed=number, structured_outputs=form)
        for number in range(requests)
    ]
    prompts = [f"People, {number}: " for number in range(requests)]
    began = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return {"model_step_ms": round(1e3 * (time.perf_counter() - began) / tokens, 1)}


def main() -> None:
    """Measure both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--forward-ms", type=float, nargs="+", default=[5.0, 10.0, 20.0])
    parser.add_argument("--model-tokens", type=int, default=30)
    args = parser.parse_args()
    llm = LLM(args.model, max_model_len=512, max_num_seqs=args.requests)
    tokenizer, info = llm.llm_engine.text, llm.llm_engine.info
    structured = Structured(lambda: vocabulary_of(tokenizer, info.vocab_size, info.eos_token_ids))
    results = [device_step(structured, args.requests, args.tokens, each) for each in args.forward_ms]
    if args.model_tokens:
        model_step(llm, args.requests, 2)  # compiles the grammar
        results.append(model_step(llm, args.requests, args.model_tokens))
    for result in results:
        json.dump(result, sys.stdout)
        print()


if __name__ == "__main__":
    main()
