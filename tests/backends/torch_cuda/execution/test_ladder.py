"""Which decode steps are captured: the sizes, and the flags that choose them."""

from __future__ import annotations

import pytest

from pagoda.common.config.groups.compilation import CompilationConfig
from pagoda.common.engine.steps.shapes import GraphSizes, usual_sizes
from pagoda.common.errors import ConfigError


def test_every_8th_size_to_256_and_every_16th_above() -> None:
    """As vLLM's, so that at most 7 sequences of a step are padding, or 15."""
    assert list(usual_sizes(1024)) == [1, 2, 4, *range(8, 256, 8), *range(256, 1025, 16)]
    assert [len(list(usual_sizes(largest))) for largest in (8, 256, 512, 1024)] == [4, 35, 51, 83]
    ladder = GraphSizes.of(CompilationConfig(), 1024)
    for seqs in range(1, 1025):
        assert 0 <= ladder.bucket_for(seqs) - seqs < (8 if seqs <= 256 else 16)


@pytest.mark.parametrize("largest", [1, 3, 8, 100, 256, 257, 300])
def test_the_largest_step_has_its_own_size(largest: int) -> None:
    ladder = GraphSizes.of(CompilationConfig(), largest)
    assert ladder.sizes == ladder.captured == tuple(sorted(set(ladder.sizes)))
    assert ladder.sizes[-1] == largest


@pytest.mark.setting("--enforce-eager", "--cudagraph-capture-sizes", "--max-cudagraph-capture-size")
@pytest.mark.setting("--compilation-config")
@pytest.mark.parametrize(
    ("settings", "captured"),
    [
        ({}, (1, 2, 4, 8, 16, 20)),
        ({"enforce_eager": True}, ()),
        ({"cudagraph_capture_sizes": (8, 3, 64)}, (3, 8)),
        ({"max_cudagraph_capture_size": 8}, (1, 2, 4, 8)),
        ({"compilation_config": {"cudagraph_capture_sizes": [5, 1]}}, (1, 5)),
        ({"compilation_config": {"max_cudagraph_capture_size": 2}}, (1, 2)),
        ({"compilation_config": {"cudagraph_mode": "none"}}, ()),
        ({"compilation_config": {"use_cudagraph": False}}, ()),
        ({"compilation_config": {"cudagraph_mode": "FULL_AND_PIECEWISE"}}, (1, 2, 4, 8, 16, 20)),
    ],
)
def test_flags_choose_what_is_captured(settings: dict, captured: tuple[int, ...]) -> None:
    ladder = GraphSizes.of(CompilationConfig(**settings), 20)
    assert ladder.captured == captured
    assert ladder.sizes[: len(captured)] == captured
    assert ladder.sizes[-1] == 20


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"cudagraph_capture_sizes": (0,)}, "--cudagraph-capture-sizes: .* is not a list of positive integers"),
        ({"max_cudagraph_capture_size": 0}, "--max-cudagraph-capture-size: 0 is not positive"),
        ({"compilation_config": {"cudagraph_mode": "PIECEWISE"}}, "PIECEWISE is not supported: .*; use NONE, FULL"),
        ({"compilation_config": {"cudagraph_capture_size": [1]}}, "unknown; did you mean cudagraph_capture_sizes"),
        ({"compilation_config": {"max_cudagraph_capture_size": "8"}}, "--compilation-config: 8 is not positive"),
        ({"cudagraph_capture_sizes": (4,), "max_cudagraph_capture_size": 8}, "8 differs from the largest capture size"),
    ],
)
def test_invalid_compilation_settings_are_refused(settings: dict, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        CompilationConfig(**settings)
