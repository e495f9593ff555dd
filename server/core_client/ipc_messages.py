"""Messages between the API process and the engine process: tagged msgpack, decoded against these types, no pickle."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import groupby
from typing import Any, Final, Literal, TypeAlias

import msgspec

from pagoda.common.config.engine import Limits
from pagoda.common.config.groups.nested.profiler import ProfileRequest
from pagoda.common.engine.lora.adapter import Adapter
from pagoda.common.engine.messages import EngineRequest, StepOutputs
from pagoda.common.engine.pooling.values import PoolingTask
from pagoda.common.errors import (
    MEMORY_REMEDY,
    ConfigError,
    EngineDeadError,
    ModelError,
    PagodaError,
    RequestError,
    WeightError,
)
from pagoda.common.models.family import AnswerFormat
from pagoda.common.models.spec import TokenSelection


class PoolingInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a pooling model offers."""

    tasks: tuple[PoolingTask, ...]  # Tasks that requests may name, the default first.
    embedding_size: int = 0  # A model without embeddings has 0.
    labels: tuple[str, ...] = ()  # Names of a classifier's labels.
    is_cross_encoder: bool = False  # A pair is scored in one prompt; otherwise a score is the cosine of two embeddings.
    pairs: Literal["tokenizer", "concatenated"] = "tokenizer"  # By `Tokenizer.encode_pair`, or the two texts.
    use_activation: bool = True  # Default of requests.
    is_matryoshka: bool = False  # Requests may name fewer dimensions.
    dimensions: tuple[int, ...] = ()  # Allowed dimensions; empty: any up to embedding_size.
    default_dimensions: int | None = None  # None: all dimensions.
    selections: dict[str, TokenSelection] = {}  # Per-token task -> selection; in other tasks every token has an output.
    prompts: dict[str, str] = {}  # Input type -> text prefix by the model's authors; only Cohere's API adds it.

    @property
    def num_labels(self) -> int:
        """Number of classes; 0 for a model without a classifier."""
        return len(self.labels)


class EncoderInfo(msgspec.Struct, frozen=True):
    """The encoder of an encoder-decoder model, which reads the prompts of requests."""

    max_tokens: int  # Maximum number of tokens of a prompt.
    decoder_start: tuple[int, ...]  # Token ids that the decoder starts from.


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What is known once the engine is ready."""

    names: tuple[str, ...]  # Served model names.
    limits: Limits
    vocab_size: int
    eos_token_ids: tuple[int, ...]  # Ids of the model's configuration and generation_config, the main one first.
    sampling_defaults: dict[str, Any] = {}  # SamplingParams fields that generation_config sets.
    backend: str
    device: str
    dtype: str
    num_blocks: int = 0  # KV blocks of all pools and copies, null blocks included.
    max_concurrency: float = 0.0  # Sequences of max_model_len tokens that the KV cache of a copy holds; 0: unknown.
    memory: str
    phases: tuple[tuple[str, float], ...]  # Start-up phases and their seconds, in order.
    pooling: PoolingInfo | None = None  # None: the model generates.
    answers: AnswerFormat = AnswerFormat()
    embeds_width: int = 0  # Numbers in a row of prompt_embeds; 0: prompt_embeds are refused.
    encoder: EncoderInfo | None = None  # None: the model has no encoder, and prompts are the beginning of the output.
    keeps_states: bool = False  # Recurrent state is kept for the prefix cache: prompts tell what later ones repeat.

    @property
    def runner(self) -> Literal["generate", "pooling"]:
        """The kind of model."""
        return "generate" if self.pooling is None else "pooling"

    def startup_table(self) -> str:
        """Return one line per start-up phase, with its seconds."""
        rows = [(name, f"{seconds:7.2f} s") for name, seconds in self.phases]
        rows.append(("total", f"{sum(seconds for _, seconds in self.phases):7.2f} s"))
        return "\n".join(f"  {name:<28}{seconds}" for name, seconds in rows)


class AddRequest(msgspec.Struct, tag="add", frozen=True):
    """Queue a sequence, and others that differ from it in id and seed only: prompt and lists are sent once."""

    request: EngineRequest
    others: tuple[tuple[str, int], ...] = ()  # Request id and seed of each.

    @classmethod
    def several(cls, requests: Iterable[EngineRequest]) -> Iterator[AddRequest]:
        """Yield messages that queue the requests; consecutive ones of one prompt share a message."""
        for _, group in groupby(requests, lambda request: id(request.prompt_token_ids)):
            first, *others = group
            same = [
                request for request in others if _with_id_and_seed(request, first.request_id, first.rules.seed) == first
            ]
            if len(same) < len(others):
                yield from map(cls, (first, *others))
            else:
                yield cls(first, tuple((request.request_id, request.rules.seed) for request in others))

    def sequences(self) -> Iterator[EngineRequest]:
        """Yield all sequences; they share prompt and lists."""
        yield self.request
        for request_id, seed in self.others:
            yield _with_id_and_seed(self.request, request_id, seed)


def _with_id_and_seed(request: EngineRequest, request_id: str, seed: int) -> EngineRequest:
    return replace(request, request_id=request_id, rules=replace(request.rules, seed=seed))


class Abort(msgspec.Struct, tag="abort", frozen=True):
    """Stop these sequences; they have no further output."""

    request_ids: list[str]


class ResetPrefixCache(msgspec.Struct, tag="reset", frozen=True):
    """Drop all cached prefixes; the reply is ResetDone with the same ticket."""

    ticket: int


class Sleep(msgspec.Struct, tag="sleep", frozen=True):
    """Finish running requests, then free the device's memory; the reply is SleepState."""

    ticket: int
    level: int


class WakeUp(msgspec.Struct, tag="wake", frozen=True):
    """Restore these parts of the memory; the reply is SleepState."""

    ticket: int
    tags: tuple[str, ...]


class Suspend(msgspec.Struct, tag="suspend", frozen=True):
    """Start no further steps; unfinished requests keep their KV. The reply is SuspendDone, when no step runs."""

    ticket: int


class Resume(msgspec.Struct, tag="resume", frozen=True):
    """Continue the suspended requests."""


UNAWAITED: Final = -1
"""The ticket of a command whose reply is not awaited."""


class LoadAdapter(msgspec.Struct, tag="load_adapter", frozen=True):
    """Read a LoRA adapter to host memory; the reply is AdapterState."""

    ticket: int
    adapter: Adapter


class TakeSnapshot(msgspec.Struct, tag="take_snapshot", frozen=True):
    """Write an incident snapshot; the reply is SnapshotTaken."""

    ticket: int


class StartProfile(msgspec.Struct, tag="start_profile", frozen=True):
    """Trace the steps that follow; the reply is ProfileState."""

    ticket: int
    request: ProfileRequest


class StopProfile(msgspec.Struct, tag="stop_profile", frozen=True):
    """Write the trace; the reply is ProfileState."""

    ticket: int


class RemoveAdapter(msgspec.Struct, tag="remove_adapter", frozen=True):
    """Forget the LoRA adapters of a number; running requests keep theirs."""

    number: int


class Rejoin(msgspec.Struct, tag="rejoin", frozen=True):
    """Another process is now the client of that number: drop the requests of the one before, and tell it Ready."""

    client: int


class Shutdown(msgspec.Struct, tag="shutdown", frozen=True):
    """End the engine after its current step."""


class Ready(msgspec.Struct, tag="ready", frozen=True):
    """The engine is warm."""

    info: EngineInfo


class Failed(msgspec.Struct, tag="failed", frozen=True):
    """The engine could not start, or died."""

    kind: str  # Class of the error.
    message: str
    name: str = ""  # The flag or field that it names.


class Restarting(msgspec.Struct, tag="restarting", frozen=True):
    """An engine has ended and is being replaced; its requests are lost. Ready follows, or Failed."""

    cause: str
    request_ids: list[str] | None = None  # Ids of the lost sequences, if other replicas serve on; None: all.


class OtherUse(msgspec.Struct, frozen=True, omit_defaults=True, array_like=True):
    """What the unfinished requests of an engine's other clients use of the queue."""

    sequences: int = 0
    tokens: int = 0  # Number of tokens of their prompts.
    callers: int = 0  # Number of callers' requests, however many prompts and sequences they have.
    owners: dict[str, tuple[int, int]] = {}  # Digest of an API key -> number of sequences and prompt tokens.


NO_OTHERS: Final = OtherUse()


class StepReply(msgspec.Struct, tag="step", frozen=True, omit_defaults=True):
    """The outputs of a step."""

    outputs: StepOutputs
    others: OtherUse | None = None  # None: about as in the message before.


class Refused(msgspec.Struct, tag="refused", frozen=True):
    """The engine refused a request."""

    request_id: str
    field: str
    message: str


class ResetDone(msgspec.Struct, tag="reset_done", frozen=True):
    """Reply to ResetPrefixCache."""

    ticket: int


class SuspendDone(msgspec.Struct, tag="suspend_done", frozen=True):
    """Reply to Suspend."""

    ticket: int


class SleepState(msgspec.Struct, tag="sleep_state", frozen=True):
    """Reply to Sleep and WakeUp."""

    ticket: int
    asleep: tuple[str, ...]  # The parts that are offloaded now.
    error: str = ""  # Why the command failed.


class AdapterState(msgspec.Struct, tag="adapter_state", frozen=True):
    """Reply to LoadAdapter."""

    ticket: int
    error: tuple[str, str] | None = None  # Field and reason, if it cannot be used.


class SnapshotTaken(msgspec.Struct, tag="snapshot_taken", frozen=True):
    """Reply to TakeSnapshot."""

    ticket: int
    path: str
    error: str = ""  # Why it could not be written.


class ProfileState(msgspec.Struct, tag="profile_state", frozen=True):
    """Reply to StartProfile and StopProfile."""

    ticket: int
    path: str = ""  # Path of the trace that was written.
    error: tuple[str, str] | None = None  # Field and reason, if it failed.


class Heartbeat(msgspec.Struct, tag="alive", frozen=True):
    """Sent every second."""

    steps: int  # Number of steps finished so far.
    busy: bool  # A request is unfinished.


Command: TypeAlias = (
    ResetPrefixCache | Sleep | WakeUp | Suspend | LoadAdapter | TakeSnapshot | StartProfile | StopProfile
)
"""A command with a reply that has the same ticket."""

Reply: TypeAlias = ResetDone | SuspendDone | SleepState | AdapterState | SnapshotTaken | ProfileState

ToEngine = AddRequest | Abort | Command | Resume | RemoveAdapter | Rejoin | Shutdown
FromEngine = Ready | Failed | Restarting | StepReply | Refused | Reply | Heartbeat

_encoder: Final = msgspec.msgpack.Encoder()
_to_engine: Final = msgspec.msgpack.Decoder(ToEngine)
_from_engine: Final = msgspec.msgpack.Decoder(FromEngine)

encode = _encoder.encode
decode_to_engine = _to_engine.decode
decode_from_engine = _from_engine.decode


def _is_out_of_memory(error: BaseException) -> bool:
    """Return whether memory of the host or device is short. Frameworks have exceptions and texts of their own."""
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or "can't allocate memory" in str(error)
        or "RESOURCE_EXHAUSTED" in str(error)
    )


def failure(error: BaseException) -> Failed:
    """Return the message for an exception."""
    if isinstance(error, ConfigError):
        return Failed("ConfigError", str(error).removeprefix(f"{error.setting}: "), error.setting)
    if isinstance(error, RequestError):
        return Failed("RequestError", str(error), error.field)
    if isinstance(error, PagodaError):
        return Failed(type(error).__name__, str(error))
    text = str(error)
    if _is_out_of_memory(error):
        return Failed("ModelError", f"{text or 'out of memory'}: {MEMORY_REMEDY}")
    return Failed("EngineDeadError", f"{type(error).__name__}: {text}" if text else type(error).__name__)


def raised(failed: Failed) -> PagodaError:
    """Return the exception for a message."""
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
