"""Settings of sub-commands that cannot be."""

from __future__ import annotations

import pytest

from pagoda.common.config.commands import CompileConfig, ConvertConfig
from pagoda.common.errors import ConfigError


@pytest.mark.parametrize("config", [CompileConfig, ConvertConfig])
def test_weights_are_divided_among_at_least_one_device(config: type[CompileConfig | ConvertConfig]) -> None:
    with pytest.raises(ConfigError, match="--tensor-parallel-size"):
        config(tensor_parallel_size=0)
