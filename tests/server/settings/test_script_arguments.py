"""Arguments of scripts that vLLM's users bring: types, defaults, files, and short forms of two settings."""

from pathlib import Path
from typing import Any

import pytest

from pagoda.common.errors import ConfigError
from pagoda.server.settings.flags import EngineArgs, ScriptParser


def test_arguments_of_a_script_have_types_defaults_and_the_values_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "engine.yaml"
    file.write_text("max-num-seqs: 7\nmax-model-len: 5\n")
    parser = ScriptParser()
    EngineArgs.add_cli_args(parser)
    args = parser.parse_args(["--max-model-len", "1k", "--config", str(file)])
    assert (args.max_model_len, args.max_num_seqs, args.tensor_parallel_size) == (1000, 7, 1)
    assert vars(args) == {"max_model_len": 1000, "max_num_seqs": 7}
    assert EngineArgs(**vars(args)).max_num_seqs == 7
    assert EngineArgs.from_cli_args(args).max_model_len == 1000
    with pytest.raises(AttributeError, match="no argument 'max_modell_len'"):
        assert args.max_modell_len


def test_short_forms_of_settings_with_keys(tmp_path: Path) -> None:
    assert EngineArgs("m", compilation_config=3).compilation_config == {"mode": 3}
    args = EngineArgs("m", hf_overrides={"max_model_len": 64, "a": 1})
    assert (args.max_model_len, args.hf_overrides) == (64, {"a": 1})
    assert EngineArgs("m", max_model_len=32, hf_overrides={"max_model_len": 64}).max_model_len == 32
    (tmp_path / "config.json").write_text(
        '{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "n": {"b": 1}}'
    )

    def change(config: Any) -> Any:
        config.rope_theta = 5.0
        return config

    assert EngineArgs(tmp_path, hf_overrides=change).hf_overrides == {"rope_theta": 5.0}
    with pytest.raises(ConfigError, match="--hf-overrides: the function failed: ZeroDivisionError"):
        EngineArgs(tmp_path, hf_overrides=lambda config: 1 // 0)
    with pytest.raises(ConfigError, match="--hf-overrides: the function returned NoneType"):
        EngineArgs(tmp_path, hf_overrides=lambda config: None)
