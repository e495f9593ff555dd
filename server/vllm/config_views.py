"""Views of a running engine's configuration with vLLM's attributes, such as `vllm_config.model_config.max_model_len`.

Each view shows what the engine resolved, then what the user set (the attributes of pagoda's own configuration group).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from pagoda.common.config.engine import EngineConfig
from pagoda.server.core_client.ipc_messages import EngineInfo


class HfConfigView:
    """A model's config.json with its keys as attributes."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = dict(values)

    def __getattr__(self, name: str) -> Any:
        values: dict[str, Any] = self.__dict__.get("_values", {})
        if name not in values:
            raise AttributeError(f"the model's config.json has no key {name!r}")
        value = values[name]
        return HfConfigView(value) if name.endswith("_config") and isinstance(value, Mapping) else value

    def to_dict(self) -> dict[str, Any]:
        """Return a copy of all keys."""
        return dict(self._values)

    def get_text_config(self, decoder: bool = False) -> HfConfigView:
        """Return the configuration of the text model."""
        inner = self._values.get("text_config")
        return HfConfigView(inner) if isinstance(inner, Mapping) else self

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._values!r})"


class GroupView:
    """A configuration group, with resolved values in place of those that the user left open."""

    def __init__(self, group: object, **resolved: Any) -> None:
        self._group = group
        self._resolved = resolved

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self._resolved[name] if name in self._resolved else getattr(self._group, name)


class ModelView(GroupView):
    """The model: `max_model_len`, `dtype`, `hf_config`, `get_vocab_size()` and the settings of ModelConfig."""

    def __init__(self, config: EngineConfig, info: EngineInfo, read_hf_config: Callable[[], Mapping[str, Any]]) -> None:
        super().__init__(
            config.model,
            max_model_len=info.limits.max_model_len,
            served_model_name=info.names[0],
            tokenizer=config.model.tokenizer or config.model.model,
            runner_type=info.runner,
            enforce_eager=config.compilation.enforce_eager,
            is_encoder_decoder=info.encoder is not None,
            is_multimodal_model=False,
            max_logprobs=config.model.max_logprobs,
        )
        self._config = config
        self._info = info
        self._read_hf_config = read_hf_config

    @property
    def dtype(self) -> Any:
        """The data type: a torch.dtype, or its name where torch is not installed."""
        return getattr(import_module("torch"), self._info.dtype) if find_spec("torch") else self._info.dtype

    @cached_property
    def hf_config(self) -> HfConfigView:
        """config.json with --hf-overrides applied."""
        return HfConfigView(self._read_hf_config())

    @property
    def hf_text_config(self) -> HfConfigView:
        """The text model's part of `hf_config`."""
        return self.hf_config.get_text_config()

    @property
    def architectures(self) -> list[str]:
        return list(self.hf_config.to_dict().get("architectures") or ())

    @property
    def architecture(self) -> str:
        return self.architectures[0]

    @property
    def is_quantized(self) -> bool:
        """True for a quantised checkpoint, and if weights are quantised while loading."""
        return self._config.model.quantization is not None

    def get_vocab_size(self) -> int:
        """Return the number of tokens that the model has logits for."""
        return self._info.vocab_size

    def get_hidden_size(self) -> int:
        """Return the width of the hidden states."""
        return int(self.hf_text_config.hidden_size)

    def get_head_size(self) -> int:
        """Return the width of an attention head."""
        values = self.hf_text_config.to_dict()
        return int(values.get("head_dim") or values["hidden_size"] // values["num_attention_heads"])

    def get_total_num_kv_heads(self) -> int:
        """Return the number of KV heads of the whole model."""
        values = self.hf_text_config.to_dict()
        return int(values.get("num_key_value_heads") or values["num_attention_heads"])

    def get_num_kv_heads(self, parallel_config: Any) -> int:
        """Return the number of KV heads on one device."""
        return max(1, self.get_total_num_kv_heads() // int(parallel_config.tensor_parallel_size))

    def get_num_attention_heads(self, parallel_config: Any) -> int:
        """Return the number of query heads on one device."""
        return int(self.hf_text_config.num_attention_heads) // int(parallel_config.tensor_parallel_size)

    def get_total_num_hidden_layers(self) -> int:
        """Return the number of layers of the whole model."""
        return int(self.hf_text_config.num_hidden_layers)

    def get_num_layers(self, parallel_config: Any) -> int:
        """Return the number of layers on one device."""
        return self.get_total_num_hidden_layers() // int(parallel_config.pipeline_parallel_size)

    def get_sliding_window(self) -> int | None:
        """Return the window of the sliding-window layers, in tokens."""
        window: int | None = self.hf_text_config.to_dict().get("sliding_window")
        return window

    def get_diff_sampling_param(self) -> dict[str, Any]:
        """Return the sampling parameters that generation_config.json sets."""
        return dict(self._info.sampling_defaults)


class VllmConfigView(GroupView):
    """All groups of an engine's configuration under vLLM's names; pagoda's names, such as `model`, work as well."""

    def __init__(self, config: EngineConfig, info: EngineInfo, read_hf_config: Callable[[], Mapping[str, Any]]) -> None:
        limits = info.limits
        super().__init__(
            config,
            model_config=ModelView(config, info, read_hf_config),
            cache_config=GroupView(
                config.cache,
                block_size=limits.block_size,
                num_gpu_blocks=info.num_blocks,
                enable_prefix_caching=limits.prefix_caching,
            ),
            scheduler_config=GroupView(
                config.scheduler,
                max_num_batched_tokens=limits.max_num_batched_tokens,
                max_num_seqs=limits.max_num_seqs,
                max_model_len=limits.max_model_len,
                enable_chunked_prefill=limits.chunked_prefill,
                chunked_prefill_enabled=limits.chunked_prefill,
                async_scheduling=limits.async_scheduling,
            ),
            parallel_config=GroupView(config.parallel, world_size=world_size(config)),
            device_config=GroupView(config.runtime, device_type=_DEVICES.get(info.backend, "cpu")),
            **other_groups(config),
        )


_DEVICES = {"jax_tpu": "tpu", "torch_cuda": "cuda"}


def world_size(config: EngineConfig) -> int:
    """Return the number of devices of one replica."""
    return config.parallel.tensor_parallel_size * config.parallel.pipeline_parallel_size


def other_groups(config: EngineConfig) -> dict[str, Any]:
    """Return the groups in which nothing is resolved, by vLLM's names; None for features that do not exist."""
    return {
        "load_config": config.load,
        "attention_config": config.attention,
        "structured_outputs_config": config.structured_outputs,
        "observability_config": config.observability,
        "compilation_config": config.compilation,
        "additional_config": config.extension.additional_config,
        "lora_config": None,
        "speculative_config": config.extension.speculative,
        "quant_config": None,
        "kv_transfer_config": None,
        "kv_events_config": None,
        "ec_transfer_config": None,
        "profiler_config": config.extension.profiler,
        "weight_transfer_config": None,
    }
