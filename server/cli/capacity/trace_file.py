"""Files of requests with arrival times: one JSON object per line.

    {"arrival": 0.5, "input_length": 1200, "output_length": 100, "hash_ids": [7, 8, 31]}
    {"arrival": 0.7, "prompt_token_ids": [1, 5, 9], "output_token_ids": [3, 4]}

`arrival` is in seconds; `timestamp`, in milliseconds, may stand for it, as in the traces that Mooncake published. A
prompt is either given or made up of `input_length` tokens. The n-th of `hash_ids` names its n-th block of
`hash_block_size` tokens: prompts share the blocks of equal ids, and all tokens after those named are their own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from pagoda.common.engine.messages import EngineRequest
from pagoda.common.engine.sampling.rules import OUTPUT_TOKENS, SamplingRules
from pagoda.common.engine.workload.drive import TimedRequest
from pagoda.common.errors import ConfigError

FLAG: Final = "--trace"
HASH_BLOCK_SIZE: Final = 512
"""Tokens that an id of `hash_ids` stands for, as in the published traces."""

Int64 = npt.NDArray[np.int64]


class TraceLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A request of a trace."""

    arrival: float | None = None  # Arrival time in seconds.
    timestamp: float | None = None  # Arrival time in milliseconds.
    prompt_token_ids: list[int] | None = None
    input_length: int | None = None
    hash_ids: list[int] = []
    hash_block_size: int = HASH_BLOCK_SIZE
    output_token_ids: list[int] | None = None
    output_length: int | None = None

    def __post_init__(self) -> None:
        if (self.arrival is None) == (self.timestamp is None):
            raise ValueError("give arrival, in seconds, or timestamp, in milliseconds")
        if (self.prompt_token_ids is None) == (self.input_length is None):
            raise ValueError("give prompt_token_ids or input_length")
        if (self.output_token_ids is None) == (self.output_length is None):
            raise ValueError("give output_token_ids or output_length")
        if self.num_prompt < 1 or self.num_output < 1 or self.hash_block_size < 1:
            raise ValueError("lengths must be 1 or more")
        if not np.isfinite(self.at) or self.at < 0:
            raise ValueError("the arrival must be 0 or later")
        if self.hash_ids and self.prompt_token_ids is not None:
            raise ValueError("hash_ids describe made-up prompts; drop them")

    @property
    def at(self) -> float:
        """The arrival, in seconds."""
        return self.arrival if self.arrival is not None else (self.timestamp or 0.0) / 1000.0

    @property
    def num_prompt(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt_token_ids or ()) if self.input_length is None else self.input_length

    @property
    def num_output(self) -> int:
        """Tokens of the output."""
        return len(self.output_token_ids or ()) if self.output_length is None else self.output_length


def read_trace(path: Path, tokens: Int64, seed: int) -> list[TimedRequest]:
    """Return the requests of a file, in the order of arrival. Raises ConfigError naming the line.

    `tokens`: ids that made-up prompts consist of.
    """
    decoder = msgspec.json.Decoder(TraceLine)
    lines: list[TraceLine] = []
    try:
        for number, text in enumerate(path.read_bytes().splitlines(), 1):
            if not text.strip():
                continue
            try:
                lines.append(decoder.decode(text))
            except (msgspec.MsgspecError, ValueError) as error:
                raise ConfigError(FLAG, f"{path}, line {number}: {error}") from None
    except OSError as error:
        raise ConfigError(FLAG, f"{path}: {error.strerror}") from None
    if not lines:
        raise ConfigError(FLAG, f"{path} has no requests; write one JSON object per line")
    lines.sort(key=lambda line: line.at)
    return [
        timed_request(str(index), line.at, _prompt(line, index, tokens, seed), line.num_output, line.output_token_ids)
        for index, line in enumerate(lines)
    ]


def _prompt(line: TraceLine, index: int, tokens: Int64, seed: int) -> list[int]:
    """Return the prompt of the request number `index`."""
    if line.prompt_token_ids is not None:
        return line.prompt_token_ids
    size = line.hash_block_size
    length = line.num_prompt
    shared = [np.random.default_rng((seed, 1, hash_id)).choice(tokens, size) for hash_id in map(abs, line.hash_ids)]
    shared_ids = np.concatenate([*shared, np.zeros(0, np.int64)])[:length]
    unshared = np.random.default_rng((seed, 0, index)).choice(tokens, length - len(shared_ids))
    return [*shared_ids.tolist(), *unshared.tolist()]


def timed_request(
    request_id: str, arrival: float, prompt: list[int], length: int, output: list[int] | None = None
) -> TimedRequest:
    """Return a request that generates exactly `length` tokens. `output`: which, if the backend is simulated."""
    rules = SamplingRules(extra_args=None if output is None else {OUTPUT_TOKENS: output})
    request = EngineRequest(
        request_id=request_id, prompt_token_ids=prompt, rules=rules, max_tokens=length, arrival=arrival
    )
    return TimedRequest(arrival, request)
