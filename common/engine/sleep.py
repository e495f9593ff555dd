"""Sleep and wake-up of an idle engine: which parts of its memory are offloaded, and in what order they are restored."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from pagoda.common.backend import SleepingBackend, Weight
from pagoda.common.config.groups.model import ModelConfig
from pagoda.common.engine.core import EngineCore
from pagoda.common.errors import ConfigError, ModelError, RequestError, SleepError

WEIGHTS: Final = "weights"
KV_CACHE: Final = "kv_cache"
TAGS: Final = (WEIGHTS, KV_CACHE)
"""The parts of an engine's memory that can be offloaded, in the order of wake-up."""

LEVELS: Final = (1, 2)
"""1: weights are kept in host memory. 2: weights are read again from the checkpoint. Both drop the KV cache."""

MODES: Final = ("abort", "wait")
"""What happens to running requests: they are aborted, or finish first."""

ASLEEP: Final = "the engine is asleep; wake it up first (POST /wake_up, or wake_up())"


class Sleeper:
    """The sleep state of one engine. `read_weights`: returns every parameter of the model, on each call."""

    def __init__(
        self, backend: SleepingBackend, core: EngineCore, read_weights: Callable[[], Iterable[Weight]]
    ) -> None:
        self._backend, self._core, self._read_weights = backend, core, read_weights
        self._asleep: tuple[str, ...] = ()
        self._level = 0

    @property
    def asleep(self) -> tuple[str, ...]:
        """The offloaded parts; empty while the engine is awake."""
        return self._asleep

    @property
    def level(self) -> int:
        """1 or 2 while a part is offloaded, else 0."""
        return self._level if self._asleep else 0

    def sleep(self, level: int) -> None:
        """Offload both parts of an idle engine. Raises SleepError and changes nothing if that fails."""
        assert not self._core.has_work, "requests end first"
        if WEIGHTS in self._asleep:
            if level != self._level:
                raise SleepError(f"the engine is asleep at level {self._level} already; wake it up first")
        else:
            self._core.reset_prefix_cache()
            try:
                self._backend.sleep(level)
            except MemoryError as error:
                raise SleepError(f"the engine stays awake: {error}") from error
        self._asleep, self._level = TAGS, level

    def wake_up(self, tags: Iterable[str]) -> None:
        """Restore parts; those that are awake stay so. Raises SleepError if one fails, which stays offloaded."""
        for tag in [tag for tag in TAGS if tag in tags and tag in self._asleep]:
            try:
                if tag == WEIGHTS:
                    self._backend.wake_weights(self._read_weights)
                else:
                    self._backend.wake_kv_cache()
            except MemoryError as error:
                raise SleepError(f"{tag} cannot wake up: {error}; free device memory and try again") from error
            except ModelError as error:
                raise SleepError(f"{tag} cannot wake up: {error}; restore the checkpoint and try again") from error
            self._asleep = tuple(other for other in self._asleep if other != tag)


def check_sleep(config: ModelConfig, level: int, mode: str) -> None:
    """Raise RequestError for an unknown level or mode, ConfigError for an engine that cannot sleep."""
    _check_enabled(config)
    if level not in LEVELS:
        raise RequestError("level", f"level {level} is not 1 (weights kept in host memory) or 2 (nothing kept)")
    if mode not in MODES:
        raise RequestError("mode", f"mode {mode[:50]} is not {' or '.join(MODES)}: the KV of requests is not kept")


def check_wake_up(config: ModelConfig, tags: Iterable[str] | None) -> tuple[str, ...]:
    """Return the parts to wake up, all if none is named. Raises as check_sleep does."""
    _check_enabled(config)
    checked = tuple(tags or TAGS)
    for tag in checked:
        if tag not in TAGS:
            raise RequestError("tags", f"tag {tag[:50]} is not {' or '.join(TAGS)}")
    return checked


def _check_enabled(config: ModelConfig) -> None:
    if not config.enable_sleep_mode:
        raise ConfigError("--enable-sleep-mode", "the engine cannot sleep; start it with this flag")
