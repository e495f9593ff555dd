"""vLLM's classes: every public member exists, with vLLM's parameters in their order, or is listed with the reason.

The table is `tests/data/vllm_python_interface.tsv`, of vLLM 0.32: `name` + `=` is keyword-only, `*` and `**` collect.
"""

from __future__ import annotations

import inspect
import re
from dataclasses import fields, is_dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from support.suite.rows import each_row

from pagoda.server.async_llm import AsyncLLM
from pagoda.server.llm_engine import LLMEngine
from pagoda.server.vllm.missing_methods import MISSING_METHODS
from pagoda.server.vllm.request_types import RequestOptions

_ROWS = [line.split("\t") for line in (Path("tests/data") / "vllm_python_interface.tsv").read_text().splitlines()[1:]]
MEMBERS = [(module, name, member, params) for module, name, member, params in _ROWS]

_INTERNAL = "vLLM's engine calls it; nobody else does"
_NEVER = "the feature does not exist, so it would always be None"
_GRAMMAR = "a constraint is always set, so it would always be False"
MISSING: dict[str, str] = {
    **{f"{kind}.{name}": why for kind, names in MISSING_METHODS.items() for name, why in names.items()},
    **dict.fromkeys(
        (
            *("SamplingParams.bad_words_token_ids", "SamplingParams.eos_token_id", "SamplingParams.for_sampler_warmup"),
            *("SamplingParams.update_from_generation_config", "SamplingParams.update_from_tokenizer"),
            *("SamplingParams.verify", "PoolingParams.verify", "PoolingParams.all_parameters"),
            *("PoolingParams.valid_parameters", "StructuredOutputsParams._backend"),
            "StructuredOutputsParams._backend_was_auto",
        ),
        _INTERNAL,
    ),
    **{
        f"{kind}.{name}": _INTERNAL
        for kind in ("EngineArgs", "AsyncEngineArgs")
        for name in (
            *("create_diffusion_config", "create_load_config", "create_logging_config", "create_model_config"),
            *("create_observability_config", "create_speculative_config", "create_structured_outputs_config"),
            *("create_watermark_config", "get_batch_defaults", "validate_tensorizer_args"),
        )
    },
    **dict.fromkeys(
        (
            *("CompletionOutput.routed_experts", "CompletionOutput.sampling_mask"),
            *("CompletionOutput.spec_decode_metrics", "CompletionOutput.weight_versions"),
        ),
        _NEVER,
    ),
    "StructuredOutputsParams.all_constraints_none": _GRAMMAR,
    "StructuredOutputsParams.all_non_structural_tag_constraints_none": _GRAMMAR,
}
"""Member -> why pagoda has none."""

OWN_NAMES: dict[str, str] = {
    **dict.fromkeys(("RequestOutput.__init__", "CompletionOutput.__init__"), "outputs are made by the engine"),
    **dict.fromkeys(
        (
            *(
                "PoolingRequestOutput.__init__",
                "EmbeddingRequestOutput.__init__",
                "ClassificationRequestOutput.__init__",
            ),
            *("ScoringRequestOutput.__init__", "RequestOutput.add", "EmbeddingOutput.from_base"),
            *("EmbeddingRequestOutput.from_base", "ClassificationOutput.from_base", "ScoringOutput.from_base"),
            *("ClassificationRequestOutput.from_base", "ScoringRequestOutput.from_base"),
        ),
        "outputs are made by the engine",
    ),
}
"""Methods whose parameters have other names, with the reason."""


def class_of(module: str, name: str) -> Any:
    return getattr(import_module(f"pagoda.{module}"), name)


def has(kind: Any, member: str) -> bool:
    listed = {field.name for field in fields(kind)} if is_dataclass(kind) else set()
    return hasattr(kind, member) or member in listed or member in getattr(kind, "__struct_fields__", ())


@each_row(("module", "name", "member", "params"), MEMBERS, ids=lambda value: str(value)[:40])
def test_a_member_exists_with_its_parameters(module: str, name: str, member: str, params: str) -> None:
    full, kind = f"{name}.{member}", class_of(module, name)
    if full in MISSING:
        assert member == "verify" or not has(kind, member), "it exists: drop it from MISSING"
        return
    assert has(kind, member), f"{full} is missing"
    if not params or OWN_NAMES.get(full):
        return
    own = [each.name for each in inspect.signature(getattr(kind, member)).parameters.values()]
    collects = any(
        each.kind is each.VAR_KEYWORD for each in inspect.signature(getattr(kind, member)).parameters.values()
    )
    wanted = [word.rstrip("=*/") for word in params.split() if not word.endswith("**")]
    keyword_only = {word.rstrip("=") for word in params.split() if word.endswith("=")}
    absent = [each for each in wanted if each not in own and not collects]
    assert not absent, f"{full} takes no {', '.join(absent)}"
    positional = [each for each in wanted if each in own and each not in keyword_only]
    assert [each for each in own if each in positional] == positional, f"the order of {full} differs"


def test_missing_methods_say_why() -> None:
    class LLM(import_module("pagoda.server.vllm.missing_methods").ExplainsMissingMethods):  # type: ignore[misc]
        pass

    for name, why in MISSING_METHODS["LLM"].items():
        with pytest.raises(AttributeError, match=re.escape(why[:20])):
            getattr(LLM(), name)
    assert not hasattr(LLM(), "update_weights")
    with pytest.raises(AttributeError, match="'LLM' object has no attribute 'nothing'"):
        assert LLM().nothing


def test_options_of_requests_are_those_of_one_declaration() -> None:
    """vLLM's callers pass them by position, so the methods name them; the names are RequestOptions'."""
    methods = (AsyncLLM.add_request, AsyncLLM.generate, AsyncLLM.encode, LLMEngine.add_request)
    arguments = {"self", "request_id", "prompt", "params", "sampling_params", "pooling_params"}
    named = [set(inspect.signature(method).parameters) - arguments for method in methods]
    assert named[0] == named[1] == set(RequestOptions.__annotations__)
    assert named[2] | named[3] <= named[0]
