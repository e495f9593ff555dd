import threading
from collections.abc import Iterator

import numpy as np
import pytest

from pagoda.common.backend import Weight
from pagoda.common.errors import WeightError
from pagoda.server.startup.parameters import Prefetch


def weights(count: int, produced: list[int]) -> Iterator[Weight]:
    for index in range(count):
        produced.append(index)
        yield str(index), np.full(10, index, np.uint8)


def test_prefetch_keeps_order_and_values() -> None:
    got = list(Prefetch(weights(50, []), 35))
    assert [name for name, _ in got] == [str(index) for index in range(50)]
    assert all((values == int(name)).all() for name, values in got)


def test_prefetch_stays_within_max_bytes() -> None:
    produced: list[int] = []
    ahead = Prefetch(weights(50, produced), 35)
    stream = iter(ahead)
    next(stream)
    ahead.close()
    assert len(produced) <= 1 + 4 + 1  # taken, 40 bytes waiting, one in hand


def test_error_is_raised_after_the_weights_before_it() -> None:
    def failing() -> Iterator[Weight]:
        yield "a", np.zeros(1)
        raise WeightError("truncated")

    stream = iter(Prefetch(failing(), 100))
    assert next(stream)[0] == "a"
    with pytest.raises(WeightError, match="truncated"):
        next(stream)


def test_close_ends_the_thread() -> None:
    before = threading.active_count()
    Prefetch(weights(1000, []), 35).close()
    for thread in threading.enumerate():
        if thread.name == "pagoda-weights":
            thread.join(5)
    assert threading.active_count() == before
