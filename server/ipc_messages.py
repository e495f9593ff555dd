"""What API process and engine process say to each other: tagged msgpack, decoded against these types, no pickle.

Knows the messages, not the sockets.
"""

from __future__ import annotations

from typing import Any, Final, Literal

import msgspec

from pagoda.common.config.engine import Limits
from pagoda.common.engine.messages import EngineRequest, StepOutputs
from pagoda.common.engine.pooling import PoolingTask
from pagoda.common.errors import ConfigError, EngineDeadError, ModelError, PagodaError, RequestError, WeightError


class PoolingInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a pooling model offers.

    `tasks`: those that requests may ask for, the usual one first. `embedding_size`: numbers in an embedding, 0 where
    there is none to be had. `labels`: names of a classifier's labels by number, else empty.
    `is_cross_encoder`: it scores a pair in one prompt; else a pair's score is the cosine of two embeddings.
    `pairs`: how such a prompt is made, by the tokenizer's rules for pairs (`Tokenizer.encode_pair`) or of the two texts
    end to end. `use_activation`: what PoolingRules get where a request says nothing.
    `is_matryoshka`: requests may ask for fewer dimensions, one of `dimensions`, or where that is empty any number up to
    embedding_size. `default_dimensions`: what they get where they say nothing; None: all.
    `prompts`: texts that go before a text of some kind, by name, as the model's authors noted them; nothing adds them.
    """

    tasks: tuple[PoolingTask, ...]
    embedding_size: int = 0
    labels: tuple[str, ...] = ()
    is_cross_encoder: bool = False
    pairs: Literal["tokenizer", "concatenated"] = "tokenizer"
    use_activation: bool = True
    is_matryoshka: bool = False
    dimensions: tuple[int, ...] = ()
    default_dimensions: int | None = None
    prompts: dict[str, str] = {}

    @property
    def num_labels(self) -> int:
        """Numbers in a classification; 0 for a model without a classifier."""
        return len(self.labels)


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What is known once the engine is ready.

    `names`: served model names. `vocab_size`: the model's, in tokens. `eos_token_ids`: of the model's configuration
    and generation_config, the main one first. `sampling_defaults`: SamplingParams fields that generation_config sets.
    `num_blocks`: KV blocks, the null block included. `phases`: start-up phases and their seconds, in order.
    `pooling`: what a pooling model offers; None: the model generates. `embeds_width`: numbers in a row of
    prompt_embeds, 0 where the engine takes none.
    """

    names: tuple[str, ...]
    limits: Limits
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    sampling_defaults: dict[str, Any] = {}
    backend: str
    device: str
    dtype: str
    num_blocks: int = 0
    memory: str
    phases: tuple[tuple[str, float], ...]
    pooling: PoolingInfo | None = None
    embeds_width: int = 0

    @property
    def runner(self) -> Literal["generate", "pooling"]:
        """What the model is for."""
        return "generate" if self.pooling is None else "pooling"

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus answer, in tokens."""
        return self.limits.max_model_len

    def startup_table(self) -> str:
        """One line per start-up phase, with its seconds."""
        rows = [(name, f"{seconds:7.2f} s") for name, seconds in self.phases]
        rows.append(("total", f"{sum(seconds for _, seconds in self.phases):7.2f} s"))
        return "\n".join(f"  {name:<28}{seconds}" for name, seconds in rows)


class AddRequest(msgspec.Struct, tag="add", frozen=True):
    """Queue one sequence."""

    request: EngineRequest


class Abort(msgspec.Struct, tag="abort", frozen=True):
    """Stop these sequences; nothing more is heard of them."""

    request_ids: list[str]


class ResetPrefixCache(msgspec.Struct, tag="reset", frozen=True):
    """Forget all cached prefixes; answered by ResetDone with the same ticket."""

    ticket: int


class Sleep(msgspec.Struct, tag="sleep", frozen=True):
    """Finish the requests under way, then give the device's memory back; answered by SleepState."""

    ticket: int
    level: int


class WakeUp(msgspec.Struct, tag="wake", frozen=True):
    """Have these parts of the memory again; answered by SleepState."""

    ticket: int
    tags: tuple[str, ...]


class Shutdown(msgspec.Struct, tag="shutdown", frozen=True):
    """End the engine in good order."""


class Ready(msgspec.Struct, tag="ready", frozen=True):
    """The engine is warm."""

    info: EngineInfo


class Failed(msgspec.Struct, tag="failed", frozen=True):
    """The engine could not start, or died. `kind`: the error's class. `name`: the flag or field it names."""

    kind: str
    message: str
    name: str = ""


class StepReply(msgspec.Struct, tag="step", frozen=True):
    """What a step brought."""

    outputs: StepOutputs


class Refused(msgspec.Struct, tag="refused", frozen=True):
    """The engine cannot take a request."""

    request_id: str
    field: str
    message: str


class ResetDone(msgspec.Struct, tag="reset_done", frozen=True):
    """Answer to ResetPrefixCache."""

    ticket: int


class SleepState(msgspec.Struct, tag="sleep_state", frozen=True):
    """Answer to Sleep and WakeUp. `asleep`: the parts that are away now. `error`: why not as asked."""

    ticket: int
    asleep: tuple[str, ...]
    error: str = ""


class Heartbeat(msgspec.Struct, tag="alive", frozen=True):
    """Sent every second. `steps`: finished so far. `busy`: there is work."""

    steps: int
    busy: bool


ToEngine = AddRequest | Abort | ResetPrefixCache | Sleep | WakeUp | Shutdown
FromEngine = Ready | Failed | StepReply | Refused | ResetDone | SleepState | Heartbeat

_encoder: Final = msgspec.msgpack.Encoder()
_to_engine: Final = msgspec.msgpack.Decoder(ToEngine)
_from_engine: Final = msgspec.msgpack.Decoder(FromEngine)

encode = _encoder.encode
decode_to_engine = _to_engine.decode
decode_from_engine = _from_engine.decode


def failure(error: BaseException) -> Failed:
    """An exception as a message."""
    if isinstance(error, ConfigError):
        return Failed("ConfigError", str(error).removeprefix(f"{error.setting}: "), error.setting)
    if isinstance(error, RequestError):
        return Failed("RequestError", str(error), error.field)
    if isinstance(error, PagodaError):
        return Failed(type(error).__name__, str(error))
    if isinstance(error, MemoryError):
        return Failed("ModelError", str(error) or "out of memory")
    text = str(error)
    return Failed("EngineDeadError", f"{type(error).__name__}: {text}" if text else type(error).__name__)


def raised(failed: Failed) -> PagodaError:
    """The exception that a message stands for."""
    match failed.kind:
        case "ConfigError":
            return ConfigError(failed.name, failed.message)
        case "RequestError":
            return RequestError(failed.name, failed.message)
        case "WeightError":
            return WeightError(failed.message)
        case "ModelError":
            return ModelError(failed.message)
        case _:
            return EngineDeadError(failed.message)
