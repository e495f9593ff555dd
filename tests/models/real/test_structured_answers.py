"""Answers of a real model to schemas of the benchmark: every finished one validates."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import pytest

from pagoda import LLM, SamplingParams
from pagoda.common.sampling_params import StructuredOutputsParams

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks" / "cpu"))

from json_schemas import schemas

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def llm(model_file: Path) -> Iterator[LLM]:
    engine = LLM(str(model_file), max_model_len=256, max_num_seqs=32)
    yield engine
    engine.shutdown()


def params_for(seed: int, tokens: int = 30, **options: object) -> SamplingParams:
    form = StructuredOutputsParams(**options)
    return SamplingParams(max_tokens=tokens, temperature=float(seed % 2), seed=seed, structured_outputs=form)


def test_finished_answers_validate(llm: LLM) -> None:
    refused = ('"not"', '"if"', "contains", "unique", "propertyNames", "dependent", "unevaluated", "(?!", "Encoding")
    wanted = [each for each in schemas(26, 1) if not any(word in json.dumps(each) for word in refused)]
    params = [params_for(number, json=schema, disable_any_whitespace=True) for number, schema in enumerate(wanted)]
    outputs = llm.generate(["A short example: "] * len(wanted), params, use_tqdm=False)
    finished = 0
    for schema, output in zip(wanted, outputs):
        answer = output.outputs[0]
        assert answer.finish_reason in ("stop", "length"), (schema, answer.stop_reason)
        if answer.finish_reason == "stop":
            finished += 1
            jsonschema.Draft202012Validator(schema).validate(json.loads(answer.text))
    assert finished > len(wanted) // 2


def test_choice_regex_and_grammar(llm: LLM) -> None:
    params = [
        params_for(1, choice=["blue", "as green as grass"]),
        params_for(1, regex=r"\d{3}-\d{2}"),
        params_for(1, grammar='root ::= "yes" | "no" [!?]'),
        params_for(0, regex="[a-z ]{5,30}\\."),
    ]
    one, two, three, four = (
        output.outputs[0].text for output in llm.generate(["The colour is"] * 4, params, use_tqdm=False)
    )
    assert one in ("blue", "as green as grass")
    assert re.fullmatch(r"\d{3}-\d{2}", two)
    assert re.fullmatch("yes|no[!?]", three)
    assert re.fullmatch("[a-z ]{5,30}\\.", four) or len(four) > 5
