"""Speculative decoding settings: the keys of --speculative-config, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final

from pagoda.common.config.fields import did_you_mean
from pagoda.common.errors import ConfigError

FLAG: Final = "--speculative-config"

HOST_METHODS: Final = ("ngram", "suffix")
"""Methods that propose drafts from tokens alone, on the host."""

MODEL_METHODS: Final = ("draft_model", "eagle", "eagle3", "medusa", "mlp_speculator", "mtp")
"""Methods whose drafts are computed by a model on the device."""

METHODS: Final = HOST_METHODS + MODEL_METHODS

_REFUSED_METHODS: Final[Mapping[str, str]] = {
    "ngram_gpu": "prompt lookup runs on the host on every backend; use ngram",
    "extract_hidden_states": "hidden states are not exported; drop it",
    "dflash": f"not in this version; use {', '.join(METHODS)}",
    "custom_class": f"proposers of your own are not loaded; use {', '.join(METHODS)}",
}
_REFUSED_KEYS: Final[Mapping[str, str]] = {
    "tensor_parallel_size": "use draft_tensor_parallel_size",
    "acceptance_method": "a draft is accepted if it equals the sampled token; drop it",
    "rejection_sample_method": "a draft is accepted if it equals the sampled token; drop it",
    "posterior_threshold": "a draft is accepted if it equals the sampled token; drop it",
    "posterior_alpha": "a draft is accepted if it equals the sampled token; drop it",
    "disable_padded_drafter_batch": "the layout of drafter batches is fixed; drop it",
    "speculative_token_tree": "drafts are chains, not trees; use num_speculative_tokens",
    "parallel_drafting": "drafts of a model are computed one after the other; drop it",
    "draft_load_config": "a drafter is read as the model is; use --load-format",
    "use_local_argmax_reduction": "the reduction over ranks is fixed; drop it",
    "disable_logprobs": "logprobs are the same with and without drafts; drop it",
    "disable_mqa_scorer": "drafts are scored by the model's own step; drop it",
}
_SUFFIX_DRAFTS: Final = 7
"""Default num_speculative_tokens of suffix: as many as decode steps are captured for on GPUs."""

_PROMPT_LOOKUP: Final = 5
"""Default longest and shortest n-gram of prompt lookup, as in vLLM."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """How drafts are proposed. Field names are the keys of --speculative-config; see `speculative_of`."""

    method: str  # One of METHODS.
    num_speculative_tokens: int | None = None  # Maximum drafts per sequence and step; None: as the drafter states.
    model: str | None = None  # Folder or name of a drafter; None: the `mtp` layers of the model itself.
    prompt_lookup_min: int = _PROMPT_LOOKUP  # Number of tokens of the shortest match, of method ngram.
    prompt_lookup_max: int = _PROMPT_LOOKUP  # Number of tokens of the longest match, of method ngram.
    suffix_decoding_max_tree_depth: int = 24  # Number of tokens of match and proposal together, of method suffix.
    suffix_decoding_max_cached_requests: int = 10_000  # Number of past answers that method suffix keeps; 0: none.
    suffix_decoding_max_spec_factor: float = 1.0  # Proposed tokens per token that matched, of method suffix.
    suffix_decoding_min_token_prob: float = 0.1  # Least estimated probability of a proposed token, of method suffix.
    disable_by_batch_size: int | None = None  # Steps of this many running sequences or more have no drafts.
    max_model_len: int | None = None  # A sequence of this length has no more drafts.
    draft_tensor_parallel_size: int | None = None
    quantization: str | None = None  # Quantisation of a drafter's weights.
    revision: str | None = None  # Revision of a drafter on the hub.
    code_revision: str | None = None
    enforce_eager: bool | None = None  # Whether a drafter runs eagerly; None: as the model does.

    @property
    def runs_on_device(self) -> bool:
        """True if a model on the device computes the drafts."""
        return self.method in MODEL_METHODS


_KEYS: Final = tuple(field.name for field in fields(SpeculativeConfig))
_SUFFIX_KEYS: Final = tuple(key for key in _KEYS if key.startswith("suffix_decoding_"))
_NGRAM_KEYS: Final = ("prompt_lookup_min", "prompt_lookup_max")
_MODEL_KEYS: Final = ("draft_tensor_parallel_size", "quantization", "revision", "code_revision", "enforce_eager")
_INTEGERS: Final[Mapping[str, int]] = {
    "num_speculative_tokens": 1,
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 1,
    "disable_by_batch_size": 2,
    "max_model_len": 2,
    "draft_tensor_parallel_size": 1,
    "suffix_decoding_max_tree_depth": 2,
    "suffix_decoding_max_cached_requests": 0,
}
"""Key -> its least value."""

_TEXTS: Final = ("method", "model", "quantization", "revision", "code_revision")


def speculative_of(settings: Mapping[str, Any]) -> SpeculativeConfig | None:
    """Return the checked settings of a --speculative-config; None if it is empty.

    Keys that are null count as not given, as do refused ones that are false. Raise ConfigError naming the key and the
    remedy.
    """
    set_keys = {key: value for key, value in settings.items() if value is not None}
    for key in set_keys:
        if key in _REFUSED_KEYS and set_keys[key] is not False:
            raise ConfigError(FLAG, f"{key} is not supported: {_REFUSED_KEYS[key]}")
        if key not in _KEYS and key not in _REFUSED_KEYS:
            raise ConfigError(FLAG, f"{key} is unknown{did_you_mean(key, _KEYS)}; drop it")
    set_keys = {key: value for key, value in set_keys.items() if key not in _REFUSED_KEYS}
    if not set_keys:
        return None
    _check_types(set_keys)
    method = _method(set_keys)
    set_keys["method"] = method
    if method in HOST_METHODS and set_keys.get("model") in (method, f"[{method}]"):
        del set_keys["model"]
    _check_keys(set_keys, method)
    if method == "ngram":
        set_keys |= _lookup_lengths(set_keys)
    if method == "suffix":
        depth = set_keys.get("suffix_decoding_max_tree_depth", 24)
        set_keys.setdefault("num_speculative_tokens", min(_SUFFIX_DRAFTS, depth - 1))
    elif method == "ngram" and "num_speculative_tokens" not in set_keys:
        raise ConfigError(FLAG, f"method {method} needs num_speculative_tokens; set it, for example to 3")
    return SpeculativeConfig(**set_keys)


def _check_types(set_keys: Mapping[str, Any]) -> None:
    for key, least in _INTEGERS.items():
        value = set_keys.get(key, least)
        if type(value) is not int:
            raise ConfigError(FLAG, f"{key} must be an integer, not {value!r}")
        if value < least:
            raise ConfigError(FLAG, f"{key} is {value}; use {least} or more")
    if not isinstance(set_keys.get("enforce_eager", False), bool):
        raise ConfigError(FLAG, f"enforce_eager must be true or false, not {set_keys['enforce_eager']!r}")
    for key in _TEXTS:
        if not isinstance(set_keys.get(key, ""), str):
            raise ConfigError(FLAG, f"{key} must be a string, not {set_keys[key]!r}")
    factor = "suffix_decoding_max_spec_factor"
    least_prob = "suffix_decoding_min_token_prob"
    for key in (factor, least_prob):
        value = set_keys.get(key, 1)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(FLAG, f"{key} must be a number, not {value!r}")
    if not 0 < set_keys.get(factor, 1) < float("inf"):
        raise ConfigError(FLAG, f"{factor} is {set_keys[factor]}; use a number above 0, such as 1.0")
    if not 0 <= set_keys.get(least_prob, 0) <= 1:
        raise ConfigError(FLAG, f"{least_prob} is {set_keys[least_prob]}; use a number from 0 to 1")


def _method(set_keys: Mapping[str, Any]) -> str:
    """Return the method: as given, or as `model` implies."""
    method = set_keys.get("method")
    model = set_keys.get("model")
    if method is None:
        if model in ("ngram", "[ngram]"):
            return "ngram"
        if model is not None:
            return "draft_model"
        raise ConfigError(FLAG, f"method is not set; use {', '.join(METHODS)}")
    if method in _REFUSED_METHODS:
        raise ConfigError(FLAG, f"method {method} is not supported: {_REFUSED_METHODS[method]}")
    if method.endswith("_mtp"):  # These are vLLM's names of mtp by architecture.
        return "mtp"
    if method not in METHODS:
        hint = did_you_mean(method, METHODS) or f"; use {', '.join(METHODS)}"
        raise ConfigError(FLAG, f"method {method!r} is unknown{hint}")
    return str(method)


def _check_keys(set_keys: Mapping[str, Any], method: str) -> None:
    """Raise ConfigError for a key that the method does not read, or lacks."""
    owners = {**dict.fromkeys(_NGRAM_KEYS, "ngram"), **dict.fromkeys(_SUFFIX_KEYS, "suffix")}
    for key in set_keys:
        if key in owners and owners[key] != method:
            raise ConfigError(FLAG, f"{key} applies to method {owners[key]}, not {method}; drop it")
        if key in ("model", *_MODEL_KEYS) and method in HOST_METHODS:
            raise ConfigError(FLAG, f"{key} applies to methods with a model, not {method}; drop it")
    if method in MODEL_METHODS and method != "mtp" and "model" not in set_keys:
        raise ConfigError(FLAG, f"method {method} needs model; set it to the drafter's folder or name")


def _lookup_lengths(set_keys: Mapping[str, Any]) -> dict[str, int]:
    """Return both lengths of prompt lookup: one that is not given equals the other."""
    lengths = [set_keys[key] for key in _NGRAM_KEYS if key in set_keys]
    if not lengths:
        return {}
    shortest = lengths[0]
    longest = lengths[-1]
    if shortest > longest:
        raise ConfigError(
            FLAG, f"prompt_lookup_min {shortest} is above prompt_lookup_max {longest}; use {longest} or less"
        )
    return {"prompt_lookup_min": shortest, "prompt_lookup_max": longest}
