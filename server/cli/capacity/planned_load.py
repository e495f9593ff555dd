"""The workload and the targets of `pagoda plan`, as its flags describe them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from pagoda.common.engine.workload.capacity import LATENCIES, PlannedLoad
from pagoda.common.errors import ConfigError
from pagoda.server.cli.capacity.trace_file import read_trace

_RANDOM: Final = re.compile(r"random:(\d+)/(\d+)((?:,\w+=[\d.]+)*)")
_OPTIONS: Final = ("range", "prefix", "prefixes")
_LATENCY: Final = re.compile(r"(\w+)=(\d+(?:\.\d+)?)(ms|s)")
_REMEDY: Final = "use random:INPUT/OUTPUT, such as random:1024/256,prefix=500, or sharegpt, or trace:FILE"

CHAT_PROMPT: Final = (4.6, 1.3)
CHAT_OUTPUT: Final = (4.9, 0.95)
"""Logarithms of tokens, mean and deviation, of `sharegpt`. With lengths from 4 to 1,024 the means are about 180 and
190: near those that benchmarks report of the ShareGPT conversations, whose prompts they cut at 1,024 tokens."""

_CHAT_BOUNDS: Final = (4, 1024)
_TRACE_TOKENS: Final = np.arange(1, 1000)


def parse_target(text: str | None) -> tuple[tuple[str, float], ...]:
    """Return the latencies of --slo in seconds, such as ttft=500ms,tpot=40ms. Raises ConfigError."""
    latencies: dict[str, float] = {}
    for part in [] if text is None else text.split(","):
        match = _LATENCY.fullmatch(part.strip())
        if match is None or match[1] not in LATENCIES or not float(match[2]):
            raise ConfigError(
                "--slo", f"{part!r} is not a latency; use {', '.join(LATENCIES)} with ms or s, such as ttft=500ms"
            )
        latencies[match[1]] = float(match[2]) * (1e-3 if match[3] == "ms" else 1.0)
    return tuple(latencies.items())


def parse_workload(text: str, requests: int, seed: int, *, timed: bool) -> PlannedLoad:
    """Return the requests of --workload; of a trace its first ones. Raises ConfigError.

    `timed`: they arrive one after the other, at random distances or as in the trace; else all at once.
    """
    rng = np.random.default_rng(seed)
    if text.startswith("trace:"):
        return _trace(Path(text.removeprefix("trace:")), requests, timed=timed)
    arrivals = tuple(np.cumsum(rng.exponential(1.0, requests)).tolist()) if timed else ()
    if text == "sharegpt":
        prompts, outputs = (
            _chat_lengths(rng, requests, mean=mean, deviation=deviation)
            for mean, deviation in (CHAT_PROMPT, CHAT_OUTPUT)
        )
        return PlannedLoad(prompts, outputs, arrivals)
    match = _RANDOM.fullmatch(text)
    if match is None:
        raise ConfigError("--workload", f"{text!r} is unknown; {_REMEDY}")
    options = _options(match[3])
    spread = options["range"]
    prefix = int(options["prefix"])
    number = int(options["prefixes"])
    prompts, outputs = (_lengths(rng, int(mean), spread, requests) for mean in (match[1], match[2]))
    if not prefix:
        return PlannedLoad(prompts, outputs, arrivals)
    return PlannedLoad(
        tuple(prefix + length for length in prompts),
        outputs,
        arrivals,
        tuple(rng.integers(0, number, requests).tolist()),
        (prefix,) * requests,
    )


def _options(text: str) -> Mapping[str, float]:
    values = {"range": 0.0, "prefix": 0.0, "prefixes": 1.0}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        if name not in values or value.count(".") > 1 or (name != "range" and "." in value):
            raise ConfigError("--workload", f"{part!r} is none of {', '.join(_OPTIONS)} with a number; {_REMEDY}")
        values[name] = float(value)
    if values["range"] >= 1 or values["prefixes"] < 1:
        raise ConfigError("--workload", "range must be below 1, and prefixes at least 1")
    return values


def _lengths(rng: np.random.Generator, mean: int, spread: float, count: int) -> tuple[int, ...]:
    """Return lengths from mean (1 - spread) to mean (1 + spread), each equally likely, at least 1."""
    low = max(1, round(mean * (1 - spread)))
    high = max(1, round(mean * (1 + spread)))
    return tuple(rng.integers(low, high + 1, count).tolist())


def _chat_lengths(rng: np.random.Generator, count: int, mean: float, deviation: float) -> tuple[int, ...]:
    lengths: npt.NDArray[np.float64] = rng.lognormal(mean, deviation, count).clip(*_CHAT_BOUNDS)
    return tuple(lengths.astype(int).tolist())


def _trace(path: Path, requests: int, *, timed: bool) -> PlannedLoad:
    """Return the first requests of a trace. Prompts that begin with the same tokens share them as a prefix."""
    lines = read_trace(path, _TRACE_TOKENS, seed=0)[:requests]
    prompts = [line.request.prompt_token_ids for line in lines]
    first = lines[0].at
    distance = (lines[-1].at - first) / max(1, len(lines) - 1)
    if timed and not distance:
        raise ConfigError("--workload", f"the requests of {path} all arrive at once; drop --slo and --request-rate")
    numbers, lengths = _shared_prefixes(prompts)
    return PlannedLoad(
        tuple(map(len, prompts)),
        tuple(line.request.max_tokens for line in lines),
        tuple((line.at - first) / distance for line in lines) if timed else (),
        numbers if any(lengths) else (),
        lengths if any(lengths) else (),
    )


_SHARED: Final = 64
"""Tokens with which prompts must begin alike to count as sharing a prefix."""


def _shared_prefixes(prompts: list[list[int]]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the number and length of the prefix of each prompt; -1 and 0 for those that begin like no other."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for index, prompt in enumerate(prompts):
        if len(prompt) > _SHARED:
            groups.setdefault(tuple(prompt[:_SHARED]), []).append(index)
    numbers = [-1] * len(prompts)
    lengths = [0] * len(prompts)
    for number, members in enumerate(group for group in groups.values() if len(group) > 1):
        common = _common(prompts[members[0]], [prompts[index] for index in members[1:]])
        for index in members:
            numbers[index] = number
            lengths[index] = common
    return tuple(numbers), tuple(lengths)


def _common(first: list[int], others: list[list[int]]) -> int:
    """Return the tokens that all prompts begin with."""
    length = len(first)
    for other in others:
        length = next(
            (index for index, (a, b) in enumerate(zip(first[:length], other)) if a != b), min(length, len(other))
        )
    return length
