"""xgrammar: the texts it compiles, and, where it is installed, its masks against brute force."""

from __future__ import annotations

import json
import random
import sys

import pytest
from support.checkpoints.grammars import EOS, SPECIAL, TEXTS, Answer, asking, text_of, vocabulary

from pagoda.common.config.groups.structured_outputs import StructuredOutputsConfig
from pagoda.common.engine.structured_output.compiler import Structured
from pagoda.common.engine.structured_output.grammar import Grammar
from pagoda.common.errors import RequestError
from pagoda.common.sampling_params import StructuredOutputsParams
from pagoda.server.processing.inputs import grammar_of

CONFIG = StructuredOutputsConfig(structured_outputs_config={"backend": "xgrammar"})
CHOICES = ["a", "ab", "abba,b", "bbb", ","]
installed = pytest.mark.program("xgrammar")


def grammar(**params: object) -> Grammar:
    return grammar_of(StructuredOutputsParams(**params), CONFIG, SPECIAL)


def test_the_backend_setting_selects_xgrammar():
    compiled = grammar(json={"type": "integer"}, disable_any_whitespace=True)
    assert compiled.engine == "xgrammar"
    assert json.loads(compiled.text) == {
        "kind": "json_schema", "text": '{"type":"integer"}', "any_whitespace": False, "closed": False,
    }  # fmt: skip
    assert json.loads(grammar(choice=['a"', "b"]).text)["text"] == r'root ::= "a\"" | "b"'
    assert json.loads(grammar(structural_tag={"format": {"type": "any_text"}}).text)["kind"] == "structural_tag"


@pytest.mark.parametrize("params", [{"grammar": 'start: "a"'}, {"json": {}, "whitespace_pattern": " "}])
def test_features_of_guidance_alone_are_refused(params):
    with pytest.raises(RequestError, match="guidance"):
        grammar(**params)


def test_missing_package_error_names_the_extra(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    with pytest.raises(RequestError, match=r"xgrammar is not installed; pip install 'pagoda\[xgrammar\]'"):
        Structured(vocabulary).mask_state(asking(grammar(choice=["a"])))


@installed
@pytest.mark.parametrize("seed", range(6))
def test_masks_against_brute_force(seed):
    answer, rng = Answer(asking(grammar(choice=CHOICES)), Structured(vocabulary)), random.Random(seed)
    while not answer.mask_state.finished:
        prefix = text_of(answer.outputs)
        fits = [text[len(prefix) :] for text in CHOICES if text.startswith(prefix)]
        want = {token for token, text in enumerate(TEXTS) if any(each.startswith(text) for each in fits)}
        assert answer.allowed == want | ({EOS} if prefix in CHOICES else set())
        answer.go(rng.choice(sorted(answer.allowed)))
    assert text_of(answer.outputs) in CHOICES


@installed
def test_compile_errors_are_reported():
    for bad in (grammar(regex="(a"), grammar(json={"type": "banana"}), grammar(grammar="root ::= (")):
        with pytest.raises(RequestError) as caught:
            Structured(vocabulary).mask_state(asking(bad))
        assert caught.value.field == "structured_outputs"
