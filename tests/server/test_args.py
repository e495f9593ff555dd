from pathlib import Path

import msgspec
import pytest

from pagoda.common.config.engine import EngineConfig
from pagoda.common.config.model import ModelConfig
from pagoda.common.errors import ConfigError
from pagoda.server.args import AsyncEngineArgs, EngineArgs
from pagoda.server.flags import FlagParser


def parse(*flags: str) -> EngineConfig:
    parser = EngineArgs.add_cli_args(FlagParser())
    return EngineArgs.from_cli_args(parser.parse_args(list(flags))).create_engine_config()


def test_defaults_are_those_of_the_configuration() -> None:
    assert EngineArgs().create_engine_config() == EngineConfig()
    assert parse() == EngineConfig()


def test_keywords_reach_the_configuration() -> None:
    args = EngineArgs("some/model", dtype="float32", max_model_len=99, scheduling_policy="priority", block_size=8)
    config = args.create_engine_config()
    assert (config.model.model, config.model.dtype, config.model.max_model_len) == ("some/model", "float32", 99)
    assert (config.scheduler.policy, config.cache.block_size) == ("priority", 8)


def test_flags_reach_the_configuration() -> None:
    config = parse(
        *("--model", "m", "--max-model-len", "4k", "--served-model-name", "a", "b", "--no-enable-prefix-caching"),
        *("--gpu-memory-utilization", "0.5", "--kv-cache-memory-bytes", "1G", "--no-async-scheduling", "--seed", "7"),
    )
    assert config.model == ModelConfig(model="m", max_model_len=4000, served_model_name=("a", "b"), seed=7)
    assert config.cache.prefix_caching is False
    assert config.cache.kv_cache_memory_bytes == 2**30
    assert config.cache.gpu_memory_utilization == 0.5
    assert config.scheduler.async_scheduling is False


@pytest.mark.parametrize("value", [-1, "auto", None])
def test_max_model_len_auto(value: object) -> None:
    assert EngineArgs(max_model_len=value).create_engine_config().model.max_model_len is None


def test_python_conveniences() -> None:
    args = EngineArgs(Path("a/b"), served_model_name="x", seed=None, max_num_batched_tokens="2k")
    assert (args.model, args.served_model_name, args.seed, args.max_num_batched_tokens) == ("a/b", ("x",), 0, 2000)


@pytest.mark.parametrize(
    ("settings", "flag"),
    [
        ({"dtype": "float63"}, "--dtype"),
        ({"max_num_seqs": "many"}, "--max-num-seqs"),
        ({"max_num_seqs": 0}, "--max-num-seqs"),
        ({"block_size": 12}, "--block-size"),
        ({"enable_prefix_caching": 3}, "--enable-prefix-caching"),
        ({"max_model_len": "1.5K"}, "--max-model-len"),
        ({"gpu_memory_utilization": float("nan")}, "--gpu-memory-utilization"),
        ({"tensor_parallel_size": 2}, "--tensor-parallel-size"),
        ({"tensor_parallel_size": True}, "--tensor-parallel-size"),
        ({"speculative_config": {"method": "ngram"}}, "--speculative-config"),
    ],
)
def test_bad_values_name_the_flag(settings: dict[str, object], flag: str) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineArgs(**settings).create_engine_config()
    assert caught.value.setting == flag


def test_unknown_keyword_names_the_nearest() -> None:
    with pytest.raises(TypeError, match=r"'max_modellen'; did you mean max_model_len\?"):
        AsyncEngineArgs(max_modellen=3)


def test_settings_without_effect_are_accepted() -> None:
    args = EngineArgs(tensor_parallel_size=1, quantization=None, trust_remote_code=False)
    assert args.create_engine_config() == EngineConfig()
    assert parse("-tp", "1", "--enforce-eager").compilation.enforce_eager
    with pytest.raises(ConfigError, match="--tensor-parallel-size: 2 is not supported"):
        parse("--tensor-parallel-size", "2")


def test_bad_flag_text_is_explained() -> None:
    with pytest.raises(ConfigError, match="--max-model-len"):
        parse("--max-model-len", "1.5K")
    with pytest.raises(ConfigError, match="--dtype"):
        parse("--dtype", "float63")


def test_config_survives_msgpack() -> None:
    config = EngineArgs("m", served_model_name=["a", "b"], max_num_seqs=3).create_engine_config()
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(config), type=EngineConfig) == config


def test_repr_shows_what_changed_and_hides_the_token() -> None:
    shown = repr(EngineArgs("m", hf_token="secret", max_num_seqs=3))
    assert shown == "EngineArgs(model='m', hf_token='***', max_num_seqs=3)"
