"""An absent key of config.json means what the configuration class of transformers makes of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from models.oracles.kept_logits import read_cases

from pagoda.common.errors import ModelError
from pagoda.common.models.hf_config.known_keys import known_type
from pagoda.common.models.registry import spec_from_config
from pagoda.common.models.spec import ModelSpec

BOOKKEEPING = ("architectures", "model_type", "transformers_version", "dtype")


def read(config: Mapping[str, Any]) -> ModelSpec | None:
    """Return the spec of a config.json that transformers wrote; None if it is refused."""
    try:
        return spec_from_config({"transformers_version": "5.0.0", **config})[0]
    except ModelError:
        return None


def read_otherwise(config: Mapping[str, Any], kind: type[Any]) -> Iterator[str]:
    """Yield the keys without which the spec is another one than with the value that the class `kind` has then."""
    for key in config.keys() - set(BOOKKEEPING):
        without = {name: value for name, value in config.items() if name != key}
        try:
            complete = kind(**without).to_dict()
        except Exception:  # The class itself needs the key.
            continue
        spec = read(without)
        if spec is not None and key in complete and spec != read({**without, key: complete[key]}):
            yield key


@pytest.mark.slow_matrix
def test_absent_keys_have_the_values_of_transformers_classes() -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    own = {
        name: case.config
        for name, case in read_cases().items()
        if case.architecture in known_type(case.config["model_type"]).architectures
    }
    assert len(own) > 140
    otherwise = {
        name: list(read_otherwise(config, CONFIG_MAPPING[config["model_type"]])) for name, config in own.items()
    }
    assert {name: keys for name, keys in otherwise.items() if keys} == {}
