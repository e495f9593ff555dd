import numpy as np
import pytest
from fakes import FakeBackend, full_layout

from pagoda.common.config.defaults import ModelLimits, Platform, resolve_limits
from pagoda.common.engine.core import KV_CACHE, SLEEP_TAGS, WEIGHTS, Sleeper, generation_core
from pagoda.common.errors import SleepError, WeightError
from pagoda.server.settings.flags import EngineArgs


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend(full_layout(4))


@pytest.fixture
def sleeper(backend: FakeBackend) -> Sleeper:
    config = EngineArgs("fake").create_engine_config()
    limits = resolve_limits(config, platform=Platform("cpu"), usage="llm", block_size=4, model=ModelLimits(64)).limits
    return Sleeper(backend, generation_core(backend, full_layout(4), limits, (64,)), lambda: [("w", np.zeros(1))] * 3)


def test_level_1_keeps_the_weights_and_level_2_reads_them(backend: FakeBackend, sleeper: Sleeper) -> None:
    for level, expected in ((1, "loaded"), (2, "read 3")):
        sleeper.sleep(level)
        assert (sleeper.asleep, sleeper.level) == (SLEEP_TAGS, level)
        sleeper.wake_up(SLEEP_TAGS)
        assert (sleeper.asleep, sleeper.level, backend.weights) == ((), 0, expected)
        assert not backend.cache_away


def test_parts_wake_up_by_tag_and_only_once(backend: FakeBackend, sleeper: Sleeper) -> None:
    sleeper.sleep(1)
    sleeper.wake_up([WEIGHTS])
    assert (sleeper.asleep, sleeper.level) == ((KV_CACHE,), 1)
    assert (backend.weights, backend.cache_away) == ("loaded", True)
    backend.weights = "must not be woken again"
    sleeper.wake_up([WEIGHTS])
    assert backend.weights == "must not be woken again"
    sleeper.sleep(2)
    assert (sleeper.asleep, sleeper.level, backend.weights) == (SLEEP_TAGS, 2, "gone")
    sleeper.wake_up([KV_CACHE])
    assert sleeper.asleep == (WEIGHTS,)


def test_the_level_of_a_sleeping_engine_cannot_change(backend: FakeBackend, sleeper: Sleeper) -> None:
    sleeper.sleep(1)
    sleeper.sleep(1)
    with pytest.raises(SleepError, match="asleep at level 1 already; wake it up first"):
        sleeper.sleep(2)
    assert backend.weights == "on the host"


def test_a_part_that_fails_to_wake_up_stays_offloaded(backend: FakeBackend, sleeper: Sleeper) -> None:
    sleeper.sleep(1)
    backend.full = True
    with pytest.raises(SleepError, match=r"weights cannot wake up: .*out of memory; free device memory"):
        sleeper.wake_up(SLEEP_TAGS)
    assert sleeper.asleep == SLEEP_TAGS
    backend.full = False
    sleeper.wake_up(SLEEP_TAGS)
    assert not sleeper.asleep


def test_a_missing_checkpoint_is_reported_on_wake_up(backend: FakeBackend, sleeper: Sleeper) -> None:
    def gone(read: object) -> None:
        raise WeightError("model.safetensors: no such file")

    backend.wake_weights = gone
    sleeper.sleep(2)
    with pytest.raises(SleepError, match="no such file; restore the checkpoint"):
        sleeper.wake_up(SLEEP_TAGS)
    assert sleeper.asleep == SLEEP_TAGS


def test_without_host_memory_the_engine_stays_awake(backend: FakeBackend, sleeper: Sleeper) -> None:
    def full(level: int) -> None:
        raise MemoryError("no room for 16 GiB")

    backend.sleep = full
    with pytest.raises(SleepError, match="stays awake: no room for 16 GiB"):
        sleeper.sleep(1)
    assert not sleeper.asleep
