"""Do answers keep to their JSON schemas, and what does a mask cost?

usage: python structured.py MODEL [--schemas 1000] [--seed 6] [--batch 64] [--max-tokens 120] [--output FILE]

Schemas of json_schemas.py go through the engine in batches, half of them greedy, half at temperature 1; each finished
answer is held against its schema by `jsonschema`, formats included. Then, without the model: the finished answers
again, 64 at a time, token by token, with the time of every mask by itself and of all 64 together.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections import Counter
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
from json_schemas import Schema, schemas

from pagoda import LLM, SamplingParams
from pagoda.common.engine.messages import EngineRequest
from pagoda.common.engine.sampling.rules import SamplingRules
from pagoda.common.engine.structured_output.compiler import Structured
from pagoda.common.engine.structured_output.grammar import Grammar, vocabulary_of
from pagoda.common.engine.structured_output.guidance import guidance_text
from pagoda.common.engine.structured_output.token_mask import TokenMaskState, refresh_masks
from pagoda.common.sampling_params import StructuredOutputsParams

CONCURRENT = 64
PROMPT = "A short value for the schema {schema} is: "


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of a schema. `fault`: why it was refused, or what does not fit."""

    schema: Schema
    fate: str  # finished, length, refused, invalid
    token_ids: tuple[int, ...] = ()
    fault: str = ""
    text: str = ""


def ask(llm: LLM, batch: list[Schema], max_tokens: int) -> list[Answer]:
    """Return an answer to each schema, generated in one batch."""
    refused: dict[int, Answer] = {}
    runs: list[tuple[int, str, SamplingParams]] = []
    for number, schema in enumerate(batch):
        form = StructuredOutputsParams(json=schema)
        params = SamplingParams(
            max_tokens=max_tokens, temperature=float(number % 2), seed=number, structured_outputs=form
        )
        prompt = PROMPT.format(schema=json.dumps(schema)[:160])
        try:
            llm.llm_engine.inputs.prepare("probe", prompt, params)
            llm.llm_engine._built.structured.compiled(Grammar(guidance_text(form, {})))
        except Exception as error:  # a RequestError, or the library's
            refused[number] = Answer(schema, "refused", fault=str(error))
            continue
        runs.append((number, prompt, params))
    outputs = llm.generate([prompt for _, prompt, _ in runs], [params for *_, params in runs], use_tqdm=False)
    checked = {number: check(batch[number], output.outputs[0]) for (number, _, _), output in zip(runs, outputs)}
    return [(refused | checked)[number] for number in range(len(batch))]


def check(schema: Schema, answer: Any) -> Answer:
    """Return a generated answer, validated against its schema."""
    tokens = tuple(answer.token_ids)
    if answer.finish_reason == "length":
        return Answer(schema, "length", tokens, text=answer.text)
    if answer.finish_reason != "stop":
        return Answer(schema, "invalid", tokens, f"{answer.finish_reason}: {answer.stop_reason}", answer.text)
    try:
        checker = jsonschema.FormatChecker()
        jsonschema.Draft202012Validator(schema, format_checker=checker).validate(json.loads(answer.text))
    except (jsonschema.ValidationError, ValueError) as error:
        return Answer(schema, "invalid", tokens, str(error).splitlines()[0], answer.text)
    return Answer(schema, "finished", tokens, text=answer.text)


def replay(structured: Structured, answers: list[Answer]) -> tuple[list[float], list[float], list[float], list[float]]:
    """Seconds: of every mask by itself, in wall-clock and in CPU time (which other programs on the machine do not
    affect), of every step of all answers together, and of compiling each grammar.
    """
    alone, processor, together, compiling = [], [], [], []
    states: list[tuple[TokenMaskState, Answer]] = []
    for answer in answers:
        grammar = Grammar(guidance_text(StructuredOutputsParams(json=answer.schema), {}))
        request = EngineRequest(
            request_id="", prompt_token_ids=[], rules=SamplingRules(), max_tokens=1, grammar=grammar
        )
        began = time.perf_counter()
        structured.mask_state(request)
        compiling.append(time.perf_counter() - began)
        states.append((structured.mask_state(request), answer))
    for place in range(max(len(answer.token_ids) for answer in answers)):
        moving = []
        for state, answer in states:
            if place < len(answer.token_ids) - 1:
                state.accept(answer.token_ids[place])
                moving.append((state, answer.token_ids[: place + 1]))
        twins = [(state.copy(), outputs) for state, outputs in moving]
        for number, one in enumerate(moving):
            if (place + number) % 2:  # half of them by themselves, before anything they share is warm
                began, busy = time.perf_counter(), time.thread_time()
                refresh_masks([one])
                processor.append(time.thread_time() - busy)
                alone.append(time.perf_counter() - began)
        began = time.perf_counter()
        refresh_masks(twins)
        together.append(time.perf_counter() - began)
    return alone, processor, together, compiling


def percentiles(seconds: list[float]) -> dict[str, float]:
    """Return median, 99th percentile and maximum in milliseconds."""
    times = 1e3 * np.array(seconds)
    return {
        "p50_ms": round(float(np.percentile(times, 50)), 4),
        "p99_ms": round(float(np.percentile(times, 99)), 4),
        "max_ms": round(float(times.max()), 4),
        "count": len(seconds),
    }


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """The whole benchmark."""
    llm = LLM(args.model, max_model_len=1024, max_num_seqs=args.batch)
    tried = schemas(args.schemas, args.seed)
    began = time.perf_counter()
    answers: list[Answer] = []
    for first in range(0, len(tried), args.batch):
        answers += ask(llm, tried[first : first + args.batch], args.max_tokens)
        print(f"{len(answers)} {dict(Counter(each.fate for each in answers))}", flush=True)
    seconds = time.perf_counter() - began
    tokenizer, info = llm.llm_engine.text, llm.llm_engine.info
    structured = Structured(lambda: vocabulary_of(tokenizer, info.vocab_size, info.eos_token_ids))
    done = [answer for answer in answers if answer.fate == "finished"]
    alone, processor, together, compiling = [], [], [], []
    for first in range(0, len(done) - CONCURRENT + 1, CONCURRENT):
        replayed = replay(structured, done[first : first + CONCURRENT])
        for total, part in zip((alone, processor, together, compiling), replayed):
            total += part
    reasons = Counter(_reason(answer.fault) for answer in answers if answer.fate == "refused")
    return {
        "schemas": len(tried),
        "seed": args.seed,
        "fates": dict(Counter(answer.fate for answer in answers)),
        "refused": dict(reasons.most_common()),
        "invalid": [
            {"schema": answer.schema, "text": answer.text, "fault": answer.fault}
            for answer in answers
            if answer.fate == "invalid"
        ],
        "tokens": sum(len(answer.token_ids) for answer in answers),
        "seconds": round(seconds, 1),
        "mask_alone": percentiles(alone) if alone else None,
        "mask_alone_processor": percentiles(processor) if processor else None,
        "mask_step_of_64": percentiles(together) if together else None,
        "compile": percentiles(compiling) if compiling else None,
        "vocabulary": info.vocab_size,
        "llguidance": version("llguidance"),
        "cpu": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
    }


def _reason(fault: str) -> str:
    return fault.removeprefix("structured_outputs: ")[:80]


def main() -> None:
    """Print the figures as JSON; with --output write them, too."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--schemas", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=6)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=120)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    results = measure(args)
    text = json.dumps(results, indent=1, ensure_ascii=False)
    print(text)
    if args.output is not None:
        args.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
