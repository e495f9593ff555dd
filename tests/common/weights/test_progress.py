"""The bar counts bytes, on a terminal only."""

from __future__ import annotations

import io

import numpy as np
import pytest

from pagoda.server.startup.parameters import with_progress

TENSORS = [("a", np.zeros(1024, np.uint8)), ("b", np.zeros(3072, np.uint8))]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("stream", "disable"), [(io.StringIO(), False), (Terminal(), True)])
def test_silent_without_a_terminal_or_when_disabled(
    stream: io.StringIO, disable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr", stream)
    assert list(with_progress(TENSORS, 4096, disable=disable)) == TENSORS
    assert stream.getvalue() == ""


def test_counts_bytes_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    assert list(with_progress(iter(TENSORS), 4096, description="Loading")) == TENSORS
    assert "Loading" in terminal.getvalue()
    assert "100%" in terminal.getvalue()
    assert "4.00k/4.00k" in terminal.getvalue()
