from dataclasses import replace

import msgspec
import pytest

from pagoda.common.config.engine import Limits
from pagoda.common.engine.messages import EngineOutput, EngineRequest, EngineStats, PositionLogprobs, StepOutputs
from pagoda.common.engine.sampling.rules import SamplingRules
from pagoda.common.errors import ConfigError, EngineDeadError, ModelError, RequestError, WeightError
from pagoda.server.core_client import ipc_messages

REQUEST = EngineRequest(
    request_id="r",
    prompt_token_ids=[1, 2],
    rules=SamplingRules(temperature=0.5, logit_bias=((3, -1.5),), bad_words=((1, 2),), stop_ids=(7,), seed=2**62),
    max_tokens=5,
    stop_token_ids=frozenset({7, 8}),
    eos_token_ids=frozenset({7}),
    cache_salt="salt",
)
INFO = ipc_messages.EngineInfo(
    names=("m",),
    limits=Limits(max_model_len=8, max_num_batched_tokens=8, max_num_seqs=2, block_size=4),
    vocab_size=10,
    eos_token_ids=(1,),
    sampling_defaults={"temperature": 0.6},
    backend="b",
    device="cpu",
    dtype="float32",
    num_blocks=9,
    memory="",
    phases=(("import", 0.25), ("load", 0.5)),
)


@pytest.mark.parametrize(
    "message",
    [
        ipc_messages.AddRequest(REQUEST, (("b", 5), ("c", 6))),
        ipc_messages.Abort(["a"]),
        ipc_messages.ResetPrefixCache(3),
        ipc_messages.Suspend(3),
        ipc_messages.Resume(),
        ipc_messages.Shutdown(),
    ],
)
def test_commands_round_trip(message: ipc_messages.ToEngine) -> None:
    assert ipc_messages.decode_to_engine(ipc_messages.encode(message)) == message


@pytest.mark.parametrize(
    "message",
    [
        ipc_messages.Ready(INFO),
        ipc_messages.Failed("ModelError", "no", ""),
        ipc_messages.Refused("r", "prompt", "no"),
        ipc_messages.ResetDone(3),
        ipc_messages.SuspendDone(3),
        ipc_messages.Heartbeat(4, True),
        ipc_messages.StepReply(
            StepOutputs(
                outputs=[
                    EngineOutput(
                        request_id="r",
                        new_token_ids=[1],
                        finish_reason="stop",
                        stop_reason=7,
                        logprobs=[PositionLogprobs(token_ids=[1, 2], logprobs=[-0.5, -1.0], rank=1)],
                    )
                ],
                stats=EngineStats(running=1, steps=3),
            )
        ),
    ],
)
def test_replies_round_trip(message: ipc_messages.FromEngine) -> None:
    assert ipc_messages.decode_from_engine(ipc_messages.encode(message)) == message


@pytest.mark.parametrize("text", [b"", b"\x80", b"\x81\xa4type\xa3add", b"\x93\x01\x02\x03"])
def test_invalid_messages_are_refused(text: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        ipc_messages.decode_to_engine(text)


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("--dtype", "no"),
        RequestError("prompt", "too long"),
        WeightError("truncated"),
        ModelError("unknown architecture"),
        EngineDeadError("gone"),
    ],
)
def test_pagoda_errors_round_trip(error: Exception) -> None:
    back = ipc_messages.raised(ipc_messages.failure(error))
    assert (type(back), str(back), vars(back)) == (type(error), str(error), vars(error))


def test_other_exceptions_become_engine_dead_errors() -> None:
    assert str(ipc_messages.raised(ipc_messages.failure(ZeroDivisionError("by zero")))) == "ZeroDivisionError: by zero"
    assert str(ipc_messages.raised(ipc_messages.failure(KeyError()))) == "KeyError"


class OutOfMemoryError(RuntimeError):
    """As frameworks name theirs."""


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OutOfMemoryError("CUDA out of memory"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
        RuntimeError("RESOURCE_EXHAUSTED: out of HBM"),
    ],
)
def test_a_memory_shortage_names_what_to_lower(error: Exception) -> None:
    back = ipc_messages.raised(ipc_messages.failure(error))
    assert isinstance(back, ModelError)
    assert str(back).startswith(str(error) or "out of memory")
    for flag in ("--max-model-len", "--max-num-seqs", "--kv-cache-memory-bytes", "--quantization"):
        assert flag in str(back)


def test_startup_table_shows_the_total() -> None:
    assert [line.split()[-2] for line in INFO.startup_table().splitlines()] == ["0.25", "0.50", "0.75"]


def test_sequences_of_a_request_share_a_message_and_their_lists() -> None:
    """n = 256 with a logit_bias of 49k tokens took 2 GB in the engine and 150 MB on the wire."""
    bias = tuple((token, 1.0) for token in range(5000))
    first = replace(REQUEST, request_id="0", rules=replace(REQUEST.rules, logit_bias=bias, seed=7), media=())
    n = [replace(first, request_id=str(index), rules=replace(first.rules, seed=7 + index)) for index in range(256)]
    other = replace(first, request_id="other", prompt_token_ids=list(first.prompt_token_ids))
    messages = list(ipc_messages.AddRequest.several([*n, other]))
    assert len(messages) == 2
    wire = ipc_messages.encode(messages[0])
    assert len(wire) < 1.2 * len(ipc_messages.encode(messages[1])) + 256 * 20
    decoded = ipc_messages.decode_to_engine(wire)
    assert isinstance(decoded, ipc_messages.AddRequest)
    sequences = list(decoded.sequences())
    assert sequences == n
    assert len({id(each.rules.logit_bias) for each in sequences}) == 1
    assert len({id(each.prompt_token_ids) for each in sequences}) == 1


def test_requests_that_differ_in_more_than_seed_are_sent_alone() -> None:
    other = replace(REQUEST, request_id="other", max_tokens=REQUEST.max_tokens + 1)
    messages = list(ipc_messages.AddRequest.several([REQUEST, other]))
    assert messages == [ipc_messages.AddRequest(REQUEST), ipc_messages.AddRequest(other)]
