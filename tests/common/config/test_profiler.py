"""The keys of --profiler-config: defaults, types, and what is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pagoda.common.config.engine import ExtensionConfig
from pagoda.common.config.groups.nested.profiler import ProfileRequest, check_profile, profiler_of
from pagoda.common.errors import ConfigError, RequestError
from pagoda.server.settings.flags import EngineArgs

TORCH = {"profiler": "torch", "torch_profiler_dir": "/traces"}


def test_defaults_are_those_of_vllm() -> None:
    config = profiler_of(TORCH)
    assert config is not None
    assert config.folder == Path("/traces")
    assert config.torch_profiler_with_stack
    assert config.torch_profiler_use_gzip
    assert not any((config.torch_profiler_record_shapes, config.torch_profiler_with_memory))
    assert not config.torch_profiler_with_flops
    assert (config.delay_iterations, config.max_iterations) == (0, 0)
    assert profiler_of({}) is None
    assert profiler_of({"profiler": None, "torch_profiler_dir": None}) is None


def test_harmless_values_of_keys_without_use_are_accepted() -> None:
    harmless = {"ignore_frontend": True, "torch_profiler_dump_cuda_time_total": False, "wait_iterations": 0}
    assert profiler_of(TORCH | harmless | {"warmup_iterations": 0, "active_iterations": 5}) == profiler_of(TORCH)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"profiler": "torch"}, "needs torch_profiler_dir; set it"),
        ({"profiler": "torch", "torch_profiler_dir": ""}, "needs torch_profiler_dir; set it"),
        ({"profiler": "cuda"}, "profiler cuda is not supported: start the server under nsys"),
        ({"profiler": "perf"}, "profiler 'perf' is unknown; use torch"),
        ({"torch_profiler_dir": "/x"}, "torch_profiler_dir has no effect without profiler; set profiler to torch"),
        (TORCH | {"torch_profiler_dir": "gs://bucket/x"}, "torch_profiler_dir 'gs://bucket/x' is no local path"),
        (TORCH | {"torch_profiler_dir": 3}, "torch_profiler_dir must be a string"),
        (TORCH | {"torch_profiler_dir": "a\0b"}, "torch_profiler_dir must be a string"),
        (TORCH | {"torch_profiler_with_stack": 1}, "torch_profiler_with_stack must be true or false, not 1"),
        (TORCH | {"torch_profiler_with_flops": "yes"}, "torch_profiler_with_flops must be true or false"),
        (TORCH | {"delay_iterations": -1}, "delay_iterations must be an integer of 0 or more, not -1"),
        (TORCH | {"max_iterations": 1.5}, "max_iterations must be an integer of 0 or more, not 1.5"),
        (TORCH | {"max_iterations": True}, "max_iterations must be an integer of 0 or more, not True"),
        (TORCH | {"torch_profiler_stack": True}, "torch_profiler_stack is unknown; .*torch_profiler_with_stack.*drop"),
        (TORCH | {"ignore_frontend": False}, "ignore_frontend False is not supported: .*drop it"),
        (TORCH | {"torch_profiler_dump_cuda_time_total": True}, "dump_cuda_time_total True is not supported"),
        (TORCH | {"wait_iterations": 1}, "wait_iterations 1 is not supported: use delay_iterations"),
        (TORCH | {"wait_iterations": False}, "wait_iterations False is not supported"),
        (TORCH | {"warmup_iterations": 1}, "warmup_iterations 1 is not supported: use delay_iterations"),
        (TORCH | {"active_iterations": 6}, "active_iterations 6 is not supported: use max_iterations"),
        (TORCH | {"cuda_profiler_control_dp_rank": 1}, "cuda_profiler_control_dp_rank 1 is not supported"),
    ],
)
def test_an_error_names_the_key(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        ExtensionConfig(profiler_config=settings)
    assert error.value.setting == "--profiler-config"


@pytest.mark.variable("PAGODA_TORCH_PROFILER_DIR")
def test_the_variable_enables_the_profiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_TORCH_PROFILER_DIR", "/of/variable")
    config = EngineArgs("m").create_engine_config().extension.profiler
    assert config is not None
    assert config.torch_profiler_dir == "/of/variable"
    given = EngineArgs("m", profiler_config={"profiler": "torch", "max_iterations": 3})
    config = given.create_engine_config().extension.profiler
    assert config is not None
    assert (config.torch_profiler_dir, config.max_iterations) == ("/of/variable", 3)


OPEN: dict[str, Any] = {"prefix": None, "delay_iterations": None, "max_iterations": None}


def test_what_a_start_leaves_open_is_as_configured() -> None:
    config = profiler_of(TORCH | {"delay_iterations": 4, "max_iterations": 5})
    assert check_profile(config, **OPEN) == ProfileRequest("", 4, 5)
    start = {"prefix": "run-1", "delay_iterations": 0, "max_iterations": 2}
    assert check_profile(config, **start) == ProfileRequest("run-1", 0, 2)
    assert check_profile(config, **OPEN, profiler_kwargs={"delay_iterations": 1}) == ProfileRequest("", 1, 5)
    assert check_profile(config, **start, profiler_kwargs={"max_iterations": 9}).max_iterations == 2
    with pytest.raises(RequestError, match=r"'profiler' cannot be set for one profile; use delay_iterations or"):
        check_profile(config, **OPEN, profiler_kwargs={"profiler": "cuda"})


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (("../x", None, None), "profile_prefix"),
        (("a/b", None, None), "profile_prefix"),
        ((".hidden", None, None), "profile_prefix"),
        (("x" * 101, None, None), "profile_prefix"),
        ((None, -1, None), "delay_iterations"),
        ((None, None, -1), "max_iterations"),
        ((None, None, 1 << 63), "max_iterations"),
    ],
)
def test_invalid_arguments_of_a_start_are_named(arguments: tuple[Any, Any, Any], field: str) -> None:
    with pytest.raises(RequestError, match=field) as error:
        check_profile(profiler_of(TORCH), **dict(zip(OPEN, arguments, strict=True)))
    assert error.value.field == field


def test_no_start_without_the_flag() -> None:
    with pytest.raises(ConfigError, match="--profiler-config: the profiler is off; set it"):
        check_profile(None, **OPEN)
