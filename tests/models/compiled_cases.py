"""Which cases of the parity matrix `make test` runs on jax_tpu, where each takes seconds to compile."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from models import tiny

from pagoda.common.models.registry import spec_from_config

_NAMES = """
llama-dynamic phi3-long opt-norm-after-narrow deepseek32-yarn deepseek2-grouped-experts olmoe-biased
phimoe-biased gpt-oss qwen3.5-moe mamba2-biased nemotron-h-dense zamba2 falcon-h1 mamba-biased falcon-mamba
lfm2-biased lfm2-moe minimax kimi-linear cohere-qk-norm hunyuan bloom gemma4 gemma4-experts gemma3n
llama4-short apertus-biased cohere2-moe-softmax telechat2 solar step1 arctic mistral4 step3p5 ling3 ling2.5
minimax-m3
"""

COMPILED = frozenset(_NAMES.split())
"""Names of cases that together have every trait of all; the others have the marker `slow_matrix`."""

Trait = tuple[str, str]
"""Where something is in a spec, and what: a class, a choice, whether it is there."""


def traits(case: tiny.Tiny) -> set[Trait]:
    """What a backend may tell apart in a case's spec: everything but numbers. Of the family it knows nothing."""
    return set(_traits(spec_from_config(case.config())[0], "spec"))


def _traits(value: Any, where: str) -> Iterator[Trait]:
    if is_dataclass(value):
        kind = type(value).__name__
        yield where, kind
        for field in fields(value):
            yield from _traits(getattr(value, field.name), f"{kind}.{field.name}")
    elif isinstance(value, tuple | list | Mapping):
        yield where, "some" if value else "none"
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _traits(each, where)
    elif value is None or isinstance(value, bool | str):
        yield where, str(value)
    elif not isinstance(value, int | float):
        yield where, type(value).__name__
