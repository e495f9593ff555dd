"""Small helpers that scripts written for vLLM import."""

from __future__ import annotations

import gc
import json
import logging
import os
import socket
import uuid
from enum import Enum, IntEnum, StrEnum
from functools import cached_property
from typing import Any, Final

from pagoda.backends.registry import choose_backend
from pagoda.common.config import env
from pagoda.common.observe.logs import ROOT
from pagoda.server.vllm.tokenizer_view import HfTokenizer


class UsageContext(StrEnum):
    """Who starts an engine. pagoda collects no usage data, so no value has an effect."""

    UNKNOWN_CONTEXT = "UNKNOWN_CONTEXT"
    LLM_CLASS = "LLM_CLASS"
    API_SERVER = "API_SERVER"
    OPENAI_API_SERVER = "OPENAI_API_SERVER"
    OPENAI_BATCH_RUNNER = "OPENAI_BATCH_RUNNER"
    ENGINE_CONTEXT = "ENGINE_CONTEXT"


class CompilationMode(IntEnum):
    """Values of `mode` in compilation_config. torch.compile is not used, so no value has an effect."""

    NONE = 0
    STOCK_TORCH_COMPILE = 1
    DYNAMO_TRACE_ONCE = 2
    VLLM_COMPILE = 3


class CUDAGraphMode(Enum):
    """Values of `cudagraph_mode` in compilation_config."""

    NONE = 0
    PIECEWISE = 1
    FULL = 2
    FULL_DECODE_ONLY = (2, 0)
    FULL_AND_PIECEWISE = (2, 1)


class ConfigKeys(dict[str, Any]):
    """A configuration object of vLLM's: the keywords are the keys that the setting takes, and attributes.

    The setting checks them: CompilationConfig for compilation_config, KVTransferConfig for kv_transfer_config.
    """

    def __init__(self, **keys: Any) -> None:
        super().__init__({name: _plain(value) for name, value in keys.items() if value is not None})

    def __getattr__(self, name: str) -> Any:
        return self.get(name)

    @classmethod
    def from_cli(cls, text: str) -> ConfigKeys:
        """Return the keys of a JSON object."""
        return cls(**json.loads(text))


def _plain(value: Any) -> Any:
    """Return a value as JSON has it."""
    if isinstance(value, IntEnum):
        return int(value)
    if isinstance(value, Enum):
        return value.name
    return list(value) if isinstance(value, tuple | set) else value


class CountUp:
    """Counts up: `next(counter)`."""

    def __init__(self, start: int = 0) -> None:
        self.counter = start

    def __next__(self) -> int:
        self.counter += 1
        return self.counter - 1

    def reset(self) -> None:
        """Start from 0 again."""
        self.counter = 0


def get_tokenizer(
    tokenizer_name: str | os.PathLike[str],
    *args: Any,
    tokenizer_mode: str = "auto",
    trust_remote_code: bool = False,
    revision: str | None = None,
    download_dir: str | None = None,
    **kwargs: Any,
) -> HfTokenizer:
    """Open the tokenizer of a folder, a GGUF file or a Hub id, with Hugging Face's interface. Raises ModelError.

    `trust_remote_code` has no effect: no code is run. Raises ConfigError for another tokenizer_mode than auto and hf.
    """
    from pagoda.server.settings.flags import EngineArgs
    from pagoda.server.settings.tokenizer import open_tokenizer

    name = os.fspath(tokenizer_name)
    args_of = {"tokenizer_mode": tokenizer_mode, "revision": revision, "download_dir": download_dir}
    opened = open_tokenizer(EngineArgs(name, **args_of).create_engine_config())
    assert opened is not None, "the tokenizer is not switched off"
    return HfTokenizer(opened, name)


ChatCompletionMessageParam = dict[str, Any]
"""A message of a conversation, as JSON has it."""


def variable(name: str) -> bool | int | float | str | None:
    """Return the value of an environment variable as `pagoda.envs.NAME` shows it; None if it is not set.

    Texts that are numbers, true or false become values. Raises AttributeError for a variable that pagoda does not know.
    """
    known = next((each for each in env.VARIABLES if name in each.names), None)
    if known is None:
        raise AttributeError(f"the environment variable {name} has no counterpart in pagoda", name=name)
    text = known.read()
    if text is None:
        return None
    try:
        value = json.loads(text.lower())
    except ValueError:
        return text
    return value if isinstance(value, bool | int | float) else text


def print_embeddings(embeds: list[float]) -> None:
    """Print the first numbers of an embedding, and its size."""
    shown = ", ".join(f"{number:.4f}" for number in embeds[:4])
    print(f"[{shown}{', ...' if len(embeds) > 4 else ''}] (size={len(embeds)})")


def init_logger(name: str) -> logging.Logger:
    """Return a logger below pagoda's, so that --log-config-file and the logging variables apply to it."""
    return logging.getLogger(name if name.split(".")[0] == ROOT else f"{ROOT}.{name}")


def random_uuid() -> str:
    """Return 32 random hexadecimal digits."""
    return uuid.uuid4().hex


def get_open_port() -> int:
    """Return a TCP port that nothing listens on at this moment."""
    with socket.socket() as listener:
        listener.bind(("", 0))
        port: int = listener.getsockname()[1]
        return port


def get_ip() -> str:
    """Return the address that this machine reaches others from; 127.0.0.1 without a network. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return "127.0.0.1"
        address: str = probe.getsockname()[0]
        return address


def cleanup_dist_env_and_memory(shutdown_ray: bool = False) -> None:
    """Collect objects that nothing refers to, so that the memory of deleted engines is free."""
    gc.collect()


class CurrentPlatform:
    """What this machine's default backend computes on."""

    @cached_property
    def device_type(self) -> str:
        """`cuda`, `tpu` or `cpu`."""
        return {"jax_tpu": "tpu", "torch_cuda": "cuda"}.get(choose_backend("auto"), "cpu")

    def is_cuda(self) -> bool:
        return self.device_type == "cuda"

    def is_cuda_alike(self) -> bool:
        return self.is_cuda()

    def is_tpu(self) -> bool:
        return self.device_type == "tpu"

    def is_cpu(self) -> bool:
        return self.device_type == "cpu"

    def is_rocm(self) -> bool:
        return False

    def is_xpu(self) -> bool:
        return False


current_platform: Final = CurrentPlatform()
