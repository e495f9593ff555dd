"""Small helpers that scripts written for vLLM import."""

from __future__ import annotations

import gc
import logging
import socket
import uuid
from enum import StrEnum
from functools import cached_property
from typing import Final

from pagoda.backends.registry import choose_backend
from pagoda.common.observe.logs import ROOT


class UsageContext(StrEnum):
    """Who starts an engine. pagoda collects no usage data, so no value has an effect."""

    UNKNOWN_CONTEXT = "UNKNOWN_CONTEXT"
    LLM_CLASS = "LLM_CLASS"
    API_SERVER = "API_SERVER"
    OPENAI_API_SERVER = "OPENAI_API_SERVER"
    OPENAI_BATCH_RUNNER = "OPENAI_BATCH_RUNNER"
    ENGINE_CONTEXT = "ENGINE_CONTEXT"


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
