"""`pagoda bench serve`: load a running OpenAI server with random prompts; print its throughput and latencies."""

from __future__ import annotations

import argparse
import asyncio
import math
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import numpy as np
from tqdm import tqdm

from pagoda.common.config.commands import OWN_SETTINGS
from pagoda.common.config.engine import EngineConfig
from pagoda.common.config.env import CLIENT_API_KEY
from pagoda.common.config.groups.bench import ServeLoadConfig
from pagoda.common.config.groups.model import ModelConfig
from pagoda.common.config.settings import build
from pagoda.common.errors import ConfigError, PagodaError
from pagoda.common.text.tokenizer import Tokenizer
from pagoda.server.cli.bench.client import Endpoint, Outcome
from pagoda.server.cli.bench.offline import ordinary_tokens, write_results
from pagoda.server.cli.bench.report import detailed, figures, report
from pagoda.server.cli.http_client import ApiClient, ApiError
from pagoda.server.processing.inputs import open_tokenizer
from pagoda.server.settings.args import resolve_flags
from pagoda.server.settings.flags import FlagParser, add_settings

SETTINGS: Final = OWN_SETTINGS["bench serve"]


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: body, prompt tokens, and sending time in seconds after the first."""

    body: dict[str, Any]
    prompt_tokens: int
    at: float


def add_arguments(parser: FlagParser) -> None:
    add_settings(parser, SETTINGS.values())


def run(args: argparse.Namespace) -> int:
    """Measure and print. Returns 1 if a request failed. Raises ApiError if the server is unreachable."""
    config: ServeLoadConfig = build(ServeLoadConfig, resolve_flags(args, SETTINGS), SETTINGS.values())
    key = CLIENT_API_KEY.read()
    name, source = _model(config, key)
    asks = make_asks(config, name, _tokenizer(source))
    endpoint = Endpoint(config.address + config.path, {"authorization": f"Bearer {key}"} if key else {})
    outcomes, seconds = asyncio.run(_load(config, endpoint, asks))
    results = figures(config, outcomes, seconds)
    print(report(config, results))
    if config.save_result:
        _save(config, name, source, results | (detailed(outcomes) if config.save_detailed else {}))
    errors = [each.error for each in outcomes if each.error]
    if errors:
        raise PagodaError(f"{len(errors)} of {len(outcomes)} requests failed, the first with: {errors[0]}")
    return 0


def _model(config: ServeLoadConfig, key: str | None) -> tuple[str, str]:
    """Return the model's name and the source of its tokenizer, by default from the server's model list."""
    name = config.served_model_name or config.model
    source = config.tokenizer or config.model
    if name and source:
        return name, source
    cards = ApiClient(f"{config.address}/v1", key).cards()
    if not cards:
        raise ApiError(f"{config.address}: the server lists no model")
    card = next((each for each in cards if each["id"] == name), cards[0])
    return name or str(card["id"]), source or str(card.get("root") or card["id"])


def _tokenizer(source: str) -> Tokenizer:
    try:
        tokenizer = open_tokenizer(EngineConfig(model=ModelConfig(model=source)))
    except PagodaError as error:
        raise ConfigError("--tokenizer", f"{source}: {error}; name the served model's folder or hub id") from None
    assert tokenizer is not None
    return tokenizer


def make_asks(config: ServeLoadConfig, model: str, tokenizer: Tokenizer) -> list[Ask]:
    """Return the requests, determined by the seed."""
    rng = np.random.default_rng(config.seed)
    tokens = ordinary_tokens(tokenizer.vocab_size, set(tokenizer.special_ids))
    prefix = rng.choice(tokens, config.random_prefix_len).tolist()
    inputs, outputs = (_lengths(rng, mean, config) for mean in (config.random_input_len, config.random_output_len))
    prompts = [prefix + rng.choice(tokens, length).tolist() for length in inputs]
    return [
        Ask(_body(config, model, prompt, tokenizer, length), len(prompt), at)
        for prompt, length, at in zip(prompts, outputs, _arrivals(rng, config))
    ]


def _lengths(rng: np.random.Generator, mean: int, config: ServeLoadConfig) -> list[int]:
    least = max(1, math.floor(mean * (1 - config.random_range_ratio)))
    most = math.ceil(mean * (1 + config.random_range_ratio))
    return [int(length) for length in rng.integers(least, most + 1, config.num_prompts)]


def _arrivals(rng: np.random.Generator, config: ServeLoadConfig) -> list[float]:
    """Return sending times in seconds; gaps follow a gamma distribution of mean 1 / rate."""
    if math.isinf(config.request_rate):
        return [0.0] * config.num_prompts
    scale = 1.0 / (config.request_rate * config.burstiness)
    gaps = rng.gamma(config.burstiness, scale, config.num_prompts - 1)
    return [0.0, *np.cumsum(gaps).tolist()]


def _body(config: ServeLoadConfig, model: str, prompt: list[int], tokenizer: Tokenizer, length: int) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": model,
        "temperature": config.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if config.ignore_eos:
        body["ignore_eos"] = True
    if not config.is_chat:
        return body | {"prompt": prompt, "max_tokens": length}
    text = tokenizer.decode(prompt)
    return body | {"messages": [{"role": "user", "content": text}], "max_completion_tokens": length}


async def _load(config: ServeLoadConfig, endpoint: Endpoint, asks: Sequence[Ask]) -> tuple[list[Outcome], float]:
    """Return the outcomes in request order, and the seconds from the first request to the last answer."""
    for _ in range(config.num_warmups):
        warmup = await endpoint.measure(asks[0].body, asks[0].prompt_tokens)
        if warmup.error:
            raise ApiError(f"{endpoint.url}: {warmup.error}; is the server running? (pagoda serve MODEL)")
    gate = nullcontext() if config.max_concurrency is None else asyncio.Semaphore(config.max_concurrency)
    began = time.perf_counter()
    with tqdm(total=len(asks), disable=config.disable_tqdm) as bar:

        async def one(ask: Ask) -> Outcome:
            await asyncio.sleep(began + ask.at - time.perf_counter())
            async with gate:
                outcome = await endpoint.measure(ask.body, ask.prompt_tokens)
            bar.update()
            return outcome

        outcomes = await asyncio.gather(*map(one, asks))
    return list(outcomes), time.perf_counter() - began


def _save(config: ServeLoadConfig, model: str, source: str, results: dict[str, Any]) -> None:
    now = datetime.now()
    header = {
        "date": f"{now:%Y%m%d-%H%M%S}",
        "backend": config.backend,
        "model_id": model,
        "tokenizer_id": source,
        "num_prompts": config.num_prompts,
        "request_rate": "inf" if math.isinf(config.request_rate) else config.request_rate,
        "burstiness": config.burstiness,
        "max_concurrency": config.max_concurrency,
        **dict(pair.split("=", 1) for pair in config.metadata),
    }
    limit = "" if config.max_concurrency is None else f"-concurrency{config.max_concurrency}"
    rate = f"{config.request_rate:g}qps"
    default = f"{config.backend}-{rate}{limit}-{model.rstrip('/').rpartition('/')[2]}-{header['date']}.json"
    folder = Path(config.result_dir or ".")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError("--result-dir", f"{folder}: {error.strerror}") from None
    write_results(str(folder / (config.result_filename or default)), header | results, "--result-filename")
