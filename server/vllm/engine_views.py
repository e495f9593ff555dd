"""What both engines, LLMEngine and AsyncLLM, show of their model and tokenizer."""

from __future__ import annotations

from functools import cached_property

from pagoda.common.config.engine import EngineConfig
from pagoda.common.errors import ConfigError
from pagoda.common.sampling_params import SamplingParams
from pagoda.common.text.tokenizer import Tokenizer
from pagoda.server.core_client.ipc_messages import EngineInfo
from pagoda.server.settings.resolve import read_hf_config
from pagoda.server.vllm.config_views import ModelView, VllmConfigView
from pagoda.server.vllm.missing_methods import ExplainsMissingMethods
from pagoda.server.vllm.tokenizer_view import HfTokenizer


class EngineViews(ExplainsMissingMethods):
    """The model and tokenizer of an engine, with vLLM's interface."""

    config: EngineConfig

    @property
    def info(self) -> EngineInfo:
        """Limits, names, vocabulary and start-up times."""
        raise NotImplementedError

    @property
    def text_or_none(self) -> Tokenizer | None:
        """The model's tokenizer; None with skip_tokenizer_init."""
        raise NotImplementedError

    @property
    def text(self) -> Tokenizer:
        """The model's tokenizer. Raises ConfigError with skip_tokenizer_init."""
        tokenizer = self.text_or_none
        if tokenizer is None:
            raise ConfigError("--skip-tokenizer-init", "the tokenizer is switched off; drop this flag")
        return tokenizer

    @property
    def tokenizer(self) -> HfTokenizer | None:
        """The model's tokenizer, with Hugging Face's interface; None with skip_tokenizer_init."""
        return None if self.text_or_none is None else self._hf_tokenizer

    def get_tokenizer(self) -> HfTokenizer:
        """Return the model's tokenizer, with Hugging Face's interface; it may be awaited.

        Raises ConfigError with skip_tokenizer_init.
        """
        return self._hf_tokenizer

    @cached_property
    def _hf_tokenizer(self) -> HfTokenizer:
        return HfTokenizer(self.text, str(self.config.model.model), self.info.limits.max_model_len)

    @cached_property
    def vllm_config(self) -> VllmConfigView:
        """The configuration with vLLM's attributes: what the engine resolved, else what was set."""
        return VllmConfigView(self.config, self.info, lambda: read_hf_config(self.config))

    @property
    def model_config(self) -> ModelView:
        """The model's part of `vllm_config`."""
        view: ModelView = self.vllm_config.model_config
        return view

    @property
    def tasks(self) -> tuple[str, ...]:
        """The task "generate", or the tasks of a pooling model."""
        return ("generate",) if self.info.pooling is None else tuple(self.info.pooling.tasks)

    def get_default_sampling_params(self) -> SamplingParams:
        """Return SamplingParams with what generation_config.json sets."""
        return SamplingParams.from_optional(**{"max_tokens": SamplingParams.max_tokens} | self.info.sampling_defaults)
