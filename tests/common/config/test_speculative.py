"""The keys of --speculative-config: what they become, and the errors of those that cannot be honoured."""

from __future__ import annotations

from typing import Any

import pytest
from support.suite.rows import each_row

from pagoda.common.config.engine import EngineConfig, ExtensionConfig, Limits
from pagoda.common.config.groups.nested.speculative import METHODS, SpeculativeConfig, speculative_of
from pagoda.common.errors import ConfigError
from pagoda.server.settings.flags import EngineArgs

NGRAM = {"method": "ngram", "num_speculative_tokens": 3}


@pytest.mark.parametrize("settings", [{}, {"method": None}])
def test_without_keys_there_is_no_speculation(settings: dict[str, Any]) -> None:
    assert speculative_of(settings) is None


@each_row(
    ("settings", "want"),
    [
        (NGRAM, {"prompt_lookup_min": 5, "prompt_lookup_max": 5}),
        (NGRAM | {"prompt_lookup_max": 4}, {"prompt_lookup_min": 4, "prompt_lookup_max": 4}),
        (NGRAM | {"prompt_lookup_min": 2}, {"prompt_lookup_min": 2, "prompt_lookup_max": 2}),
        (
            NGRAM | {"prompt_lookup_min": 2, "prompt_lookup_max": 4},
            {"prompt_lookup_min": 2, "prompt_lookup_max": 4, "method": "ngram", "num_speculative_tokens": 3},
        ),
        ({"model": "ngram", "num_speculative_tokens": 2}, {"method": "ngram", "model": None}),
        ({"model": "[ngram]", "num_speculative_tokens": 2}, {"method": "ngram", "model": None}),
        ({"method": "suffix"}, {"num_speculative_tokens": 7, "suffix_decoding_max_tree_depth": 24}),
        ({"method": "suffix", "suffix_decoding_max_tree_depth": 5}, {"num_speculative_tokens": 4}),
        ({"method": "suffix", "num_speculative_tokens": 16}, {"num_speculative_tokens": 16}),
        ({"method": "suffix", "suffix_decoding_max_spec_factor": 2}, {"suffix_decoding_max_spec_factor": 2}),
        ({"model": "a/b", "num_speculative_tokens": 2}, {"method": "draft_model", "model": "a/b"}),
        ({"method": "deepseek_mtp"}, {"method": "mtp", "num_speculative_tokens": None, "model": None}),
        (
            {"method": "eagle", "model": "a/b", "num_speculative_tokens": 2, "draft_tensor_parallel_size": 1},
            {"method": "eagle", "draft_tensor_parallel_size": 1},
        ),
        (NGRAM | {"disable_by_batch_size": 8, "max_model_len": 99}, {"disable_by_batch_size": 8, "max_model_len": 99}),
        (NGRAM | {"revision": None}, {"revision": None}),
    ],
)
def test_keys(settings: dict[str, Any], want: dict[str, Any]) -> None:
    config = speculative_of(settings)
    assert isinstance(config, SpeculativeConfig)
    assert {key: getattr(config, key) for key in want} == want


@each_row(
    ("settings", "message"),
    [
        ({"metod": "ngram"}, "metod is unknown; did you mean method?; drop it"),
        ({"method": "ngrm"}, "method 'ngrm' is unknown; did you mean ngram?"),
        ({"method": "zzz"}, f"method 'zzz' is unknown; use {', '.join(METHODS)}"),
        ({"num_speculative_tokens": 3}, f"method is not set; use {', '.join(METHODS)}"),
        ({"method": "ngram"}, "method ngram needs num_speculative_tokens; set it, for example to 3"),
        ({"method": "ngram_gpu"}, "method ngram_gpu is not supported: prompt lookup runs on the host on every backend"),
        ({"method": "dflash"}, "method dflash is not supported: not in this version; use ngram"),
        ({"method": 5}, "method must be a string, not 5"),
        (NGRAM | {"num_speculative_tokens": 0}, "num_speculative_tokens is 0; use 1 or more"),
        (NGRAM | {"num_speculative_tokens": True}, "num_speculative_tokens must be an integer, not True"),
        (NGRAM | {"num_speculative_tokens": "3"}, "num_speculative_tokens must be an integer, not '3'"),
        (
            NGRAM | {"prompt_lookup_min": 4, "prompt_lookup_max": 3},
            "prompt_lookup_min 4 is above prompt_lookup_max 3; use 3 or less",
        ),
        (NGRAM | {"prompt_lookup_max": 0}, "prompt_lookup_max is 0; use 1 or more"),
        (NGRAM | {"disable_by_batch_size": 1}, "disable_by_batch_size is 1; use 2 or more"),
        (NGRAM | {"model": "a/b"}, "model applies to methods with a model, not ngram; drop it"),
        (NGRAM | {"quantization": "fp8"}, "quantization applies to methods with a model, not ngram; drop it"),
        (
            NGRAM | {"suffix_decoding_min_token_prob": 0.1},
            "suffix_decoding_min_token_prob applies to method suffix, not ngram; drop it",
        ),
        (
            {"method": "suffix", "prompt_lookup_max": 3},
            "prompt_lookup_max applies to method ngram, not suffix; drop it",
        ),
        (
            {"method": "suffix", "suffix_decoding_min_token_prob": 1.5},
            "suffix_decoding_min_token_prob is 1.5; use a number from 0 to 1",
        ),
        (
            {"method": "suffix", "suffix_decoding_max_spec_factor": 0},
            "suffix_decoding_max_spec_factor is 0; use a number above 0, such as 1.0",
        ),
        (
            {"method": "suffix", "suffix_decoding_max_spec_factor": "1"},
            "suffix_decoding_max_spec_factor must be a number, not '1'",
        ),
        (NGRAM | {"tensor_parallel_size": 2}, "tensor_parallel_size is not supported: use draft_tensor_parallel_size"),
        (NGRAM | {"speculative_token_tree": "[]"}, "speculative_token_tree is not supported: drafts are chains"),
        ({"method": "eagle", "num_speculative_tokens": 2}, "method eagle needs model; set it to the drafter's folder"),
    ],
)
@pytest.mark.setting("--speculative-config")
def test_errors_name_the_key_and_the_remedy(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        EngineArgs("m", speculative_config=settings)
    assert str(error.value).startswith(f"--speculative-config: {message}")
    with pytest.raises(ConfigError):
        ExtensionConfig(speculative_config=settings)


@pytest.mark.setting("--spec-method")
@pytest.mark.setting("--spec-model")
@pytest.mark.setting("--spec-tokens")
def test_short_flags_are_keys_of_the_setting() -> None:
    args = EngineArgs("m", spec_method="ngram", spec_tokens=4, speculative_config={"prompt_lookup_max": 3})
    config = args.create_engine_config().extension.speculative
    assert config is not None
    assert (config.method, config.num_speculative_tokens, config.prompt_lookup_max) == ("ngram", 4, 3)
    drafter = EngineArgs("m", spec_model="a/b", spec_tokens=2).create_engine_config().extension.speculative
    assert drafter is not None
    assert (drafter.method, drafter.model) == ("draft_model", "a/b")
    with pytest.raises(ConfigError, match=r"^--spec-method: contradicts --speculative-config; drop --spec-method"):
        EngineArgs("m", spec_method="suffix", speculative_config=NGRAM)


def test_a_step_has_room_for_a_sequence_and_its_drafts() -> None:
    limits = {"max_model_len": 64, "max_num_seqs": 2, "block_size": 8}
    Limits(max_num_batched_tokens=8, max_drafts=7, **limits).check()
    with pytest.raises(ConfigError, match=r"^--speculative-config: num_speculative_tokens is 8, but a step has 8 tok"):
        Limits(max_num_batched_tokens=8, max_drafts=8, **limits).check()
    assert EngineConfig().extension.speculative is None
