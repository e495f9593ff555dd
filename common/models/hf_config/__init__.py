"""Strict reader of a Hugging Face `config.json`, and of the keys that many families share.

Every key must be read, expected or ignored by name: an unread key could change the maths, so it is an error. A null
counts as absent. Shared keys: activations, RoPE in its old and new form, layer types.
"""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Final, TypeVar

from pagoda.common.errors import ModelError
from pagoda.common.models.hf_config.known_keys import UNKNOWN, Origin
from pagoda.common.models.rope import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    Rope,
    RopeScaling,
    RotatedPairs,
    YarnScaling,
)
from pagoda.common.models.spec import Activation

T = TypeVar("T", int, float, bool, str, list[Any], dict[str, Any])

# Keys of any family that do not change a forward pass: training, bookkeeping, tokenizer and generation settings.
HARMLESS: Final = (
    # Origin of the file.
    *("*name_or_path", "_commit_hash", "architectures", "model_type", "auto_map", "transformers*", "unsloth*"),
    *("is_llama_config", "torch_dtype", "dtype", "xla_device", "_pre_quantization_dtype", "custom_pipelines"),
    *("_from_model_config", "model_name", "pipeline_tag", "license", "framework"),
    # Implementation, not maths.
    *("*attn_implementation*", "*experts_implementation*", "*flash_attn*", "*flash_attention*", "*xformers*"),
    *("use_cache", "cache_implementation", "num_logits_to_keep", "logits_to_keep"),
    *("pretraining_tp", "chunk_size_feed_forward", "tf_legacy_loss", "output_*", "return_dict*", "use_return_dict"),
    *("keys_to_ignore_at_inference",),
    # Training.
    *("*dropout", "*_pdrop", "*dropout_prob", "layerdrop", "initializer_*", "init_std", "gradient_checkpointing*"),
    *("*_loss_coef", "*_loss_coeff", "*_loss_weight", "*_loss_factor", "router_jitter_noise", "neftune_noise_alpha"),
    # The tokenizer.
    *("*token_id", "*_token_ids", "tokenizer*", "max_sequence_length", "model_max_length", "max_seq_length", "prefix"),
    *("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token", "use_sep_token"),
    # Tasks; classifiers read the labels.
    *("task_specific_params", "finetuning_task", "problem_type", "id2label", "label2id", "num_labels", "_num_labels"),
    *("sentence_transformers", "sbert_ce_default_activation_function", "is_matryoshka", "matryoshka_dimensions"),
    # Generation settings of old files; only generation_config.json counts.
    *("do_sample", "temperature", "top_k", "top_p", "typical_p", "num_beams", "num_beam_groups", "max_length"),
    *("min_length", "max_new_tokens", "min_new_tokens", "repetition_penalty", "length_penalty"),
    *("exponential_decay_length_penalty", "diversity_penalty", "penalty_alpha", "no_repeat_ngram_size"),
    *("encoder_no_repeat_ngram_size", "early_stopping", "bad_words_ids", "suppress_tokens", "begin_suppress_tokens"),
    *("num_return_sequences", "remove_invalid_values"),
)

_ACTIVATIONS: Final[dict[str, Activation]] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}


MAX_NUMBER: Final = 1 << 40
"""Maximum of whole numbers that stand for real ones, such as the base of RoPE."""

MAX_LENGTH: Final = 1 << 30
"""Maximum of lengths in tokens."""

MAX_SIZE: Final = 1 << 24
"""Maximum of other integers, such as widths and numbers of token ids: ten times those of the largest models."""

MAX_HEAD_SIZE: Final = 1 << 16
"""Maximum width of a head, for each channel of which RoPE has a frequency."""

MAX_LAYERS: Final = 10_000
"""Maximum of numbers of layers and of heads, for each of which there are objects."""

_HEAD_COUNTS: Final = frozenset({"num_attention_heads", "n_head", "n_heads", "num_heads", "num_key_value_heads"})
_LAYER_COUNTS: Final = frozenset({"num_hidden_layers", "num_layers", "n_layer", "n_layers", "num_nextn_predict_layers"})
_LENGTHS: Final = frozenset(
    {
        *("max_position_embeddings", "original_max_position_embeddings", "n_positions", "seq_length", "max_seq_len"),
        *("sliding_window", "sliding_window_size", "attention_chunk_size", "local_attention"),
    }
)


class HfConfig:
    """A config whose keys must all be consumed by `need`, `opt`, `nullable`, `expect` or `ignore` before `finish`.

    Every error is a ModelError naming the key and the model type.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        *,
        label: str | None = None,
        path: tuple[str, ...] = (),
        origin: Origin | None = None,
    ) -> None:
        self._origin = origin or Origin(file={}, text={})
        self._known = self._origin.known
        self._defaults = self._origin.defaults
        self._file = values
        self._values: Mapping[str, Any] = {**self._aliased(values), **values}
        self._label = label or f"model type {values.get('model_type', 'unknown')!r}"
        self._path = path  # Keys from the top of the file to this object.
        self._read: set[str] = set()

    def __contains__(self, key: str) -> bool:
        return self._values.get(key) is not None

    def error(self, key: str, problem: str) -> ModelError:
        """Return a ModelError about one key."""
        return ModelError(f"config.json: {key} {problem} ({self._label})")

    def need(self, key: str, kind: type[T], *aliases: str) -> T:
        """Return the value of `key` or of its first alias present. Raises ModelError if all are absent."""
        self._read.update((key, *aliases))
        for name in (key, *aliases):
            if name in self:
                return self._typed(name, kind)
        for name in (key, *aliases):
            if self._has_default(name):
                return self._typed(name, kind)
        raise self.error(key, "is missing")

    def opt(self, key: str, kind: type[T], default: T) -> T:
        """Return the value, that of transformers' class if the key is absent, or `default`."""
        self._read.add(key)
        return default if self._value(key) is None else self._typed(key, kind)

    def nullable(self, key: str, kind: type[T], default: T | None = None) -> T | None:
        """Return the value, None if it is null; if the key is absent that of transformers' class, or `default`."""
        self._read.add(key)
        if key not in self._values and not self._has_default(key):
            return default
        return None if self._value(key) is None else self._typed(key, kind)

    def is_number(self, key: str) -> bool:
        """Return whether the value is a number, where a list may stand for one."""
        return isinstance(self._value(key), int | float)

    def is_text(self, key: str) -> bool:
        """Return whether the value is a string, where a list may stand for one."""
        return isinstance(self._value(key), str)

    def size(self, key: str, *aliases: str) -> int:
        """Return a required integer of at least 1."""
        return self._positive(key, self.need(key, int, *aliases))

    def opt_size(self, key: str, default: int) -> int:
        """Return an optional integer of at least 1."""
        return self._positive(key, self.opt(key, int, default))

    def auto_size(self, key: str, default: int) -> int:
        """Return an optional integer of at least 1, `default` also if it is "auto"."""
        if self._value(key) != "auto":
            return self.opt_size(key, default)
        self._read.add(key)
        return default

    def per_layer(self, key: str, layers: int, default: int | None = None) -> list[int]:
        """Return an integer for each layer, from a list or from one integer for all. `default`: None if required."""
        self._read.add(key)
        if isinstance(self._values.get(key), list):
            values: list[Any] = self.need(key, list)
            if len(values) != layers or not all(type(value) is int for value in values):
                raise self.error(key, f"is {values}; it must be {layers} integers, one per layer")
            return [self._bounded(key, value, int) for value in values]
        return [self.need(key, int) if default is None else self.opt(key, int, default)] * layers

    def window(self, default: int | None) -> int | None:
        """Return `sliding_window` in tokens; None if it is null: full attention."""
        window = self.nullable("sliding_window", int, default)
        return None if window is None else self._positive("sliding_window", window)

    def expect(self, key: str, *allowed: object) -> None:
        """Raise ModelError unless the value, or that of transformers' class if it is absent, is allowed or null."""
        self._read.add(key)
        value = self._value(key)
        if value is not None and value not in allowed:
            # Lists have an item per layer and would be long.
            choices = " or ".join(reprlib.repr(value) for value in allowed)
            raise self.error(key, f"is {reprlib.repr(value)}; only {choices} is supported")

    def ignore(self, *keys: str) -> None:
        """Mark keys as read that do not change this family's maths."""
        self._read.update(keys)

    def alias(self, key: str, *names: str) -> None:
        """Take the value of `key`, if it is absent, from the first of these older names that is present."""
        self._read.update(names)
        value = next((self._values[name] for name in names if name in self), None)
        if value is None and not self._has_default(key):
            value = next((self._defaults[name] for name in names if self._has_default(name)), None)
        if key not in self and value is not None:
            self._values = {**self._values, key: value}

    def default(self, key: str, value: object) -> None:
        """Take `value` for `key` if it is absent and transformers' class has no default: for shared readers."""
        if key not in self and not self._has_default(key):
            self._values = {**self._values, key: value}

    def set(self, key: str, value: object) -> None:
        """Take `value` for `key`, whatever the file has: for keys whose meaning differs from that of shared readers."""
        self._values = {**self._values, key: value}

    def section(self, key: str) -> HfConfig | None:
        """Return a reader of a nested object, to be finished separately; None if absent."""
        self._read.add(key)
        values = self.opt(key, dict, {})
        if key not in self and not values:
            return None
        return HfConfig(values, label=f"{key}, {self._label}", path=(*self._path, key))

    def layer_sections(self, key: str, layers: int) -> Mapping[int, HfConfig] | None:
        """Return readers of the objects that a nested object has for some layers, by layer number; None if absent.

        transformers 5 pads the numbers with zeros. Each reader is to be finished separately.
        """
        sections = self.section(key)
        if sections is None:
            return None
        found: dict[int, HfConfig] = {}
        for name in sections._values:
            section = sections.section(name) if name.isdecimal() and int(name) not in found else None
            if section is not None:
                found[int(name)] = section
        if above := [layer for layer in found if layer >= layers]:
            raise self.error(key, f"has an entry for layer {above[0]} of {layers} layers")
        sections.finish()
        return found

    def finish(self) -> None:
        """Raise ModelError naming every unread key that could matter, and the override that drops it."""
        if self._values.get("use_sliding_window") is False:
            self.ignore("sliding_window", "max_window_layers")
        types = self._values.get("layer_types")
        if "layer_types" not in self._read and isinstance(types, list) and types == ["full_attention"] * len(types):
            self.ignore("layer_types")
        problems = dict(self._problems())
        for key, problem in problems.items():
            if problem != UNKNOWN:
                remedy = f"if it does not change the result: {self._without((key,))}"
                raise ModelError(f"{self.error(key, problem)}; {remedy}")
        if unread := list(problems):
            noun, pronoun = ("key", "it does") if len(unread) == 1 else ("keys", "they do")
            unknown = self.error(", ".join(unread), f"unknown {noun} that could change the result")
            raise ModelError(f"{unknown}; if {pronoun} not: {self._without(unread)}")

    def _problems(self) -> Iterator[tuple[str, str]]:
        """Yield the unread keys of the file that are refused, with the reason."""
        for key in sorted(self._file.keys() - self._read):
            value = self._file[key]
            if value is None or is_harmless(key):
                continue
            if any(name in self._read and value == self._values[name] for name in self._known.partners(key)):
                continue
            if (problem := self._origin.problem(key, value)) is not None:
                yield key, problem

    def _aliased(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of keys that the file has under another name of transformers' class."""
        other = {name: key for key in values for name in self._known.partners(key)}
        return {name: values[key] for name, key in other.items() if values[key] is not None}

    def _has_default(self, key: str) -> bool:
        """Return whether the file lacks a key for which transformers' class has a value."""
        if key == "rope_parameters" and not self._values.keys().isdisjoint(("rope_scaling", "rope_theta")):
            return False
        return key not in self._values and key in self._defaults

    def _without(self, keys: Sequence[str]) -> str:
        """Return the flag that sets these keys to null."""
        override: dict[str, Any] = dict.fromkeys(keys)
        for name in reversed(self._path):
            override = {name: override}
        return f"--hf-overrides '{json.dumps(override, ensure_ascii=False)}'"

    def activation(self, key: str, default: str) -> Activation:
        """Return the activation with the given Hugging Face name."""
        name = self.opt(key, str, default)
        if name not in _ACTIVATIONS:
            raise self.error(key, f"is {name!r}; supported: {', '.join(sorted(_ACTIVATIONS))}")
        return _ACTIVATIONS[name]

    def layer_types(self, layers: int, default: Sequence[str]) -> tuple[str, ...]:
        """Return `full_attention` or `sliding_attention` for each layer."""
        return self.layer_kinds("layer_types", layers, default, ("full_attention", "sliding_attention"))

    def layer_kinds(self, key: str, layers: int, default: Sequence[str], supported: Sequence[str]) -> tuple[str, ...]:
        """Return the kind that a list states for each layer. Raise ModelError for another kind or number of entries."""
        kinds = self.opt(key, list, list(default))
        for kind in kinds:
            if kind not in supported:
                raise self.error(key, f"has {kind!r}; supported: {', '.join(supported)}")
        if len(kinds) != layers:
            raise self.error(key, f"has {len(kinds)} entries for {layers} layers")
        return tuple(kinds)

    def ffn_kinds(self, layers: int, default: Sequence[str]) -> tuple[str, ...]:
        """Return `dense` or `sparse`, a mixture of experts, for each layer."""
        return self.layer_kinds("mlp_layer_types", layers, default, ("dense", "sparse"))

    def _positive(self, key: str, value: int) -> int:
        if value < 1:
            raise self.error(key, f"is {value}; it must be at least 1")
        return value

    def _bounded(self, key: str, value: int, kind: type) -> int:
        limit = MAX_NUMBER if kind is float else _limit(key)
        if not -limit <= value <= limit:
            shown = str(value) if abs(value) < 1 << 64 else "a number of more than 64 bits"
            raise self.error(key, f"is {shown}; it must be at most {limit}")
        return value

    def _value(self, key: str) -> Any:
        """Return the value of the file, that of transformers' class if the key is absent, or None."""
        return self._defaults[key] if self._has_default(key) else self._values.get(key)

    def _typed(self, key: str, kind: type[T]) -> T:
        value = self._value(key)
        if isinstance(value, int) and not isinstance(value, bool) and kind in (int, float):
            value = kind(self._bounded(key, value, kind))
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise self.error(key, f"is {value!r}, not of type {kind.__name__}")
        if isinstance(value, float) and not math.isfinite(value):
            raise self.error(key, f"is {value}, not a finite number")
        return value


def _limit(key: str) -> int:
    """Return the maximum of an integer."""
    if key in _LAYER_COUNTS or key in _HEAD_COUNTS:
        return MAX_LAYERS
    return MAX_LENGTH if key in _LENGTHS else MAX_SIZE


def is_harmless(key: str) -> bool:
    """Return whether a key never changes a forward pass, in any family."""
    return any(fnmatchcase(key, pattern) for pattern in HARMLESS)


def head_dim(config: HfConfig, width: int, heads: int) -> int:
    """Return `head_dim`, or width / heads."""
    if "head_dim" not in config and width % heads:
        raise config.error("num_attention_heads", f"{heads} does not divide hidden_size {width}")
    return config.opt_size("head_dim", width // heads)


def kv_heads(config: HfConfig, heads: int) -> int:
    """Return `num_key_value_heads` (default: `heads`). Raises ModelError unless it divides `heads`."""
    count = config.opt_size("num_key_value_heads", heads)
    if heads % count:
        raise config.error("num_key_value_heads", f"{count} does not divide num_attention_heads {heads}")
    return count


def rope(
    config: HfConfig,
    head_dim: int,
    *,
    theta: float = 10_000.0,
    partial: float = 1.0,
    read_elsewhere: tuple[str, ...] = (),
) -> Rope:
    """Return RoPE from `rope_theta` + `rope_scaling`, or from `rope_parameters` (transformers 5).

    `theta`, `partial`: the family's default base and rotated part of a head. `read_elsewhere`: keys of the section that
    the family reads.
    """
    theta = config.opt("rope_theta", float, theta)
    partial = config.opt("partial_rotary_factor", float, partial)
    section = rope_section(config)
    if section is not None:
        section.ignore(*read_elsewhere)
    return _rope(config, section, head_dim, theta, partial)


def rope_per_layer_type(
    config: HfConfig, head_dim: int, *, full: float, sliding: float, full_head_dim: int | None = None
) -> dict[str, Rope]:
    """Return RoPE by layer type, with separate bases for `full_attention` and `sliding_attention`.

    Old form: `rope_theta` and `rope_scaling` for full layers, `rope_local_base_freq` for sliding ones.
    New form: `rope_parameters` with one entry per layer type. `full`, `sliding`: the family's default bases.
    `full_head_dim`: that of full layers, if it differs.
    """
    thetas = {
        "full_attention": config.opt("rope_theta", float, full),
        "sliding_attention": config.opt("rope_local_base_freq", float, sliding),
    }
    parameters = config.section("rope_parameters")
    legacy = config.section("rope_scaling")
    sections = {kind: parameters.section(kind) if parameters else None for kind in thetas}
    if parameters is not None:
        parameters.finish()
    sections["full_attention"] = sections["full_attention"] or legacy
    dims = {"full_attention": full_head_dim or head_dim, "sliding_attention": head_dim}
    return {kind: _rope(config, sections[kind], dims[kind], thetas[kind], 1.0) for kind in thetas}


def yarn_scale(config: HfConfig) -> float:
    """Return the factor on the scale of q.k that YaRN's `mscale_all_dim` states; 1 without it."""
    section = rope_section(config)
    all_dim = 0.0 if section is None else section.opt("mscale_all_dim", float, 0.0)
    return _yarn_mscale(section.need("factor", float), all_dim) ** 2 if section is not None and all_dim else 1.0


def rope_section(config: HfConfig) -> HfConfig | None:
    """Return the reader of `rope_parameters` or `rope_scaling`, if any."""
    return config.section("rope_parameters") or config.section("rope_scaling")


def context_length(config: HfConfig, rope: Rope) -> int:
    """Return the maximum context in tokens: `max_position_embeddings`, extended by the RoPE scaling."""
    positions = config.size("max_position_embeddings")
    match rope.scaling:
        case LinearScaling(factor) | DynamicScaling(factor) if math.isfinite(factor):
            return int(positions * factor)
        case YarnScaling():
            return max(positions, int(rope.scaling.original * rope.scaling.factor))
        case _:
            return positions


def _rope(config: HfConfig, section: HfConfig | None, head_dim: int, theta: float, partial: float) -> Rope:
    if section is None:
        section = HfConfig({})
    theta = section.opt("rope_theta", float, theta)
    partial = section.opt("partial_rotary_factor", float, partial)
    # These say which axis of an image rotates a channel; for text all are equal.
    section.ignore("mrope_section", "mrope_interleaved")
    if section.opt("rope_type", str, "") == "proportional":
        section.expect("factor", 1.0)
        section.finish()
        return Rope(theta, head_dim, RotatedPairs(int(partial * head_dim // 2)))
    stated = int(head_dim * partial)
    dim = stated + stated % 2  # A last half pair rotates whole.
    if head_dim > MAX_HEAD_SIZE:
        raise config.error("head_dim", f"is {head_dim}; it must be at most {MAX_HEAD_SIZE}")
    if dim < 2 or dim > head_dim or theta <= 1:
        raise config.error("rope", f"theta {theta} on {stated} of {head_dim} channels is not a rotation")
    if "alpha" in section:  # This is NTK scaling by a fixed factor, whatever the context.
        section.expect("type", "dynamic")
        section.expect("rope_type", "dynamic")
        section.ignore("factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
        scaling = None
        theta = theta * section.need("alpha", float) ** (dim / (dim - 2))
    else:
        scaling = _scaling(config, section, dim)
    section.finish()
    if stated != dim:
        if scaling is not None or "alpha" in section:
            raise config.error("rope", f"scales the rotation of {stated} channels; only of an even number is supported")
        theta **= dim / stated  # The exponents count pairs of the stated channels.
    return Rope(theta, dim, scaling)


def _scaling(config: HfConfig, section: HfConfig, dim: int) -> RopeScaling | None:
    kind = section.opt("rope_type", str, section.opt("type", str, "default"))
    positions = config.size("max_position_embeddings")
    # A key beside the section takes precedence.
    original = config.opt_size(
        "original_max_position_embeddings", section.opt_size("original_max_position_embeddings", positions)
    )
    # These are of image positions; text has the same position on all three axes.
    section.ignore("mrope_section", "mrope_interleaved")
    match kind:
        case "default" | "mrope":
            return None
        case "linear":
            return LinearScaling(section.need("factor", float))
        case "dynamic":
            return DynamicScaling(section.need("factor", float), positions)
        case "llama3":
            return Llama3Scaling(
                section.need("factor", float),
                section.need("low_freq_factor", float),
                section.need("high_freq_factor", float),
                original,
            )
        case "yarn":
            return _yarn(section, positions, original)
        case "longrope" | "su":
            return _longrope(section, positions, original, dim)
        case _:
            raise config.error("rope_type", f"is {kind!r}; supported: default, linear, dynamic, llama3, yarn, longrope")


def _yarn(section: HfConfig, positions: int, original: int) -> YarnScaling:
    factor = section.opt("factor", float, positions / original)
    mscale = section.opt("mscale", float, 0.0)
    all_dim = section.opt("mscale_all_dim", float, 0.0)
    suggested = _yarn_mscale(factor, mscale) / _yarn_mscale(factor, all_dim) if mscale and all_dim else None
    section.ignore("finetuned")
    return YarnScaling(
        factor,
        original,
        beta_fast=section.opt("beta_fast", float, 0.0) or 32.0,
        beta_slow=section.opt("beta_slow", float, 0.0) or 1.0,
        attention_factor=section.opt("attention_factor", float, suggested or _yarn_mscale(factor, 1.0)),
        truncate=section.opt("truncate", bool, True),
    )


def _yarn_mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _longrope(section: HfConfig, positions: int, original: int, dim: int) -> LongRopeScaling:
    factor = section.opt("factor", float, positions / original)
    suggested = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    if "long_mscale" in section:
        suggested = section.need("long_mscale", float)
        section.expect("short_mscale", suggested)
    lists = {key: section.need(key, list) for key in ("short_factor", "long_factor")}
    for key, values in lists.items():
        if len(values) != dim // 2:
            raise section.error(key, f"has {len(values)} entries for {dim // 2} rotary pairs")
        if not all(type(value) in (int, float) and 0 < value < math.inf for value in values):
            raise section.error(key, "has other entries than positive numbers")
    return LongRopeScaling(
        tuple(float(value) for value in lists["short_factor"]),
        tuple(float(value) for value in lists["long_factor"]),
        original,
        section.opt("attention_factor", float, suggested),
    )
