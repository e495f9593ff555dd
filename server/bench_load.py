"""What both offline benchmarks share: the engine, prompts of random tokens, and a JSON file of results."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pagoda.common.errors import ConfigError
from pagoda.common.sampling_params import SamplingParams
from pagoda.server.args import EngineArgs
from pagoda.server.flags import FlagParser
from pagoda.server.llm import LLM


def add_load_arguments(parser: FlagParser, *, input_len: int, output_len: int) -> None:
    """Flags of the load, and the engine's own."""
    group = parser.add_argument_group("load")
    group.add_argument("--input-len", type=int, default=input_len, help="Tokens of each prompt.")
    group.add_argument("--output-len", type=int, default=output_len, help="Tokens to generate for each prompt.")
    group.add_argument("--n", type=int, default=1, help="Sequences generated per prompt.")
    group.add_argument("--disable-detokenize", action="store_true", help="Leave detokenisation out of the time.")
    group.add_argument("--output-json", metavar="FILE", help="Write the results to this file.")
    EngineArgs.add_cli_args(parser)


def check_positive(args: argparse.Namespace, *names: str) -> None:
    """Raise ConfigError naming the first of these flags that is not positive."""
    for name in names:
        value = getattr(args, name)
        if value < 1:
            raise ConfigError(f"--{name.replace('_', '-')}", f"{value} is not positive")


def start_llm(args: argparse.Namespace) -> LLM:
    """The engine to measure. Raises ConfigError when a request would not fit its context."""
    llm = LLM.from_engine_args(EngineArgs.from_cli_args(args))
    limit = llm.llm_engine.info.max_model_len
    if args.input_len + args.output_len > limit:
        llm.shutdown()
        raise ConfigError(
            "--output-len",
            f"{args.input_len} + {args.output_len} tokens exceed the context of {limit}; lower one of them",
        )
    return llm


def random_prompts(llm: LLM, count: int, length: int, seed: int) -> list[Any]:
    """Prompts of random token ids, without special tokens; the same for the same seed."""
    vocab = llm.llm_engine.info.vocab_size
    special = set() if llm.llm_engine.config.model.skip_tokenizer_init else set(llm.get_tokenizer().special_ids)
    ordinary = np.array([token for token in range(vocab) if token not in special])
    ids = np.random.default_rng(seed).choice(ordinary, size=(count, length))
    return [{"prompt_token_ids": row} for row in ids.tolist()]


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    """Exactly `output_len` tokens at temperature 1."""
    return SamplingParams(
        n=args.n,
        temperature=1.0,
        ignore_eos=True,
        max_tokens=args.output_len,
        detokenize=not args.disable_detokenize,
    )


def write_results(path: str | None, results: Mapping[str, Any]) -> None:
    """Write results as JSON. Raises ConfigError when the file cannot be written."""
    if path is None:
        return
    try:
        Path(path).write_text(json.dumps(results, indent=4) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError("--output-json", f"{path}: {error.strerror}") from None
