"""LoRA adapters are read in a process with limits: what a hostile one costs is its own request."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.checkpoints.adapters import llama_modules, save_adapter, write_adapter
from support.checkpoints.tiny_folder import CONFIG

from pagoda.common.engine.lora.adapter import Adapter
from pagoda.common.errors import RequestError
from pagoda.common.models.registry import ARCHITECTURES, family, spec_from_config
from pagoda.common.models.shapes import params
from pagoda.common.weights.lora.peft import BaseModel, read_adapter
from pagoda.common.weights.lora.weights import adaptable
from pagoda.server.startup import adapter_reader as module
from pagoda.server.startup.adapter_reader import AdapterReader

MODULES = llama_modules(32, 48, 4, 2, 2)


SPEC, FAMILY = spec_from_config(CONFIG)


def base() -> BaseModel:
    return BaseModel(FAMILY.rules, params(SPEC), adaptable(SPEC), 16, copied=("head",))


def adapter(folder: Path) -> Adapter:
    return Adapter(number=1, name="own", path=str(folder), version=0)


def test_an_adapter_is_what_reading_it_here_gives(tmp_path: Path) -> None:
    folder, reader = tmp_path / "a", AdapterReader(base())
    write_adapter(folder, MODULES, rank=3, use_dora=True, saved={"lm_head": (257, 32)})
    expected = read_adapter(folder, base())
    for _ in range(2):
        found = reader.read(adapter(folder))
        assert (found.rank, found.matrices.keys()) == (expected.rank, expected.matrices.keys())
        for name, factors in expected.matrices.items():
            np.testing.assert_array_equal(found.matrices[name].a, factors.a)
            np.testing.assert_array_equal(found.matrices[name].b, factors.b)
            assert found.matrices[name].a.flags.writeable, "else torch warns of it"
            np.testing.assert_array_equal(found.matrices[name].copy, factors.copy)
        assert found.magnitudes.keys() == expected.magnitudes.keys()
        for name, lengths in expected.magnitudes.items():
            np.testing.assert_array_equal(found.magnitudes[name], lengths)


def test_the_rules_of_every_family_reach_the_process() -> None:
    for architecture in ARCHITECTURES:
        sent = BaseModel(family(architecture).rules, params(SPEC), adaptable(SPEC), 16)
        assert module._decoded_base(module._encoded_base(sent)) == sent, architecture


def test_hostile_adapters_end_within_their_limits_and_the_next_one_is_read(tmp_path: Path) -> None:
    reader = AdapterReader(base(), seconds=0.5)
    good = write_adapter(tmp_path / "good", MODULES)
    slow = write_adapter(tmp_path / "slow", MODULES, rank_pattern={"(((.*)*)*)*x": 4})
    name = f"base_model.model.{'a' * 60}"
    tensors = {f"{name}.lora_{part}.weight": np.ones((4, 4), np.float32) for part in "AB"}
    strange = save_adapter(tmp_path / "strange", tensors, r=4, rank_pattern={"(a+)+b": 4})
    for folder, words in (
        (slow, r"adapter own: it needs more than 0.5 s of processor time; save it again"),
        (strange, r"adapter own: .*/strange: the model has no module a{60}; is"),
        (tmp_path / "none", r"adapter own: .*/none: no such folder"),
    ):
        with pytest.raises(RequestError, match=words) as error:
            reader.read(adapter(folder))
        assert error.value.field == "lora_request"
        assert reader.read(adapter(good)).matrices
