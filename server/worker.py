"""The worker that `collective_rpc` and `apply_model` call: the model of an engine that runs in this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final

from pagoda.common.errors import RequestError
from pagoda.server.config_views import VllmConfigView

METHODS: Final = ("check_health", "get_model", "get_supported_tasks")
"""Methods of a worker that `collective_rpc` takes by name."""


@dataclass(frozen=True, slots=True)
class Worker:
    """One worker: functions given to `collective_rpc` get it as their first argument."""

    backend: Any
    vllm_config: VllmConfigView
    tasks: tuple[str, ...]
    rank: int = 0
    local_rank: int = 0

    @property
    def model_config(self) -> Any:
        return self.vllm_config.model_config

    @property
    def device(self) -> Any:
        """The device: a torch.device, or its name for a backend other than torch's."""
        kind = self.vllm_config.device_config.device_type
        return import_module("torch").device(kind) if kind != "tpu" and find_spec("torch") else kind

    def get_model(self) -> Any:
        """Return the backend's model: its decoder (jax_tpu: StepModel), not a torch module as vLLM's."""
        return self.backend.model

    def get_supported_tasks(self) -> tuple[str, ...]:
        return self.tasks

    def check_health(self) -> None:
        """Return: a worker in this process lives."""

    def call(self, method: str | Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> Any:
        """Call a function with the worker, or a method by name. Raises RequestError for an unknown one."""
        if callable(method):
            return method(self, *args, **(kwargs or {}))
        if method not in METHODS:
            raise RequestError(
                "method",
                f"the worker has no method {str(method)[:60]!r}; it has {', '.join(METHODS)}; or pass a function, "
                "which gets the worker as its first argument",
            )
        return getattr(self, method)(*args, **(kwargs or {}))
