"""Which model, in which numbers, under which names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pagoda.common.config.numbers import human_readable_int_or_auto
from pagoda.common.config.option import option
from pagoda.common.errors import ConfigError

DType = Literal["auto", "float32", "float", "bfloat16", "float16", "half"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The model and how it is read."""

    model: str = option("HuggingFaceTB/SmolLM2-135M-Instruct", "A local folder, a .gguf file, or a hub id.")
    tokenizer: str | None = option(None, "Folder, file or hub id of the tokenizer, when it is not the model's own.")
    revision: str | None = option(None, "Branch, tag or commit of the hub repository.")
    tokenizer_revision: str | None = option(None, "Branch, tag or commit of the tokenizer's hub repository.")
    hf_token: str | None = option(None, "Token for gated hub repositories.")
    download_dir: str | None = option(None, "Where hub downloads are kept; default: the hub's own cache.")
    load_format: Literal["auto", "safetensors", "pt", "gguf", "dummy"] = option(
        "auto", "Format of the weights; auto looks at the files, dummy makes random ones."
    )
    dtype: DType = option("auto", "Numbers of weights and activations; auto takes the checkpoint's.")
    seed: int = option(0, "Seed of requests that bring none.")
    max_model_len: int | None = option(
        None, "Longest prompt plus answer, in tokens; default: what the model states.", parse=human_readable_int_or_auto
    )
    max_logprobs: int = option(20, "Most logprobs a request may ask for; -1: the whole vocabulary.")
    served_model_name: tuple[str, ...] = option((), "Names the API answers to; the first is echoed.")
    skip_tokenizer_init: bool = option(False, "Serve token ids only; load no tokenizer.")
    generation_config: str = option("auto", "Folder of generation_config.json; auto: the model's; vllm: none.")
    backend: str = option("auto", "Device backend: reference, torch_cuda, jax_tpu; auto picks by platform.")

    def __post_init__(self) -> None:
        if self.max_logprobs < -1:
            raise ConfigError("--max-logprobs", f"{self.max_logprobs} is below -1; use -1 for the whole vocabulary")
        if self.max_model_len is not None and self.max_model_len < 1:
            raise ConfigError("--max-model-len", f"{self.max_model_len} is not a positive number of tokens")

    @property
    def names(self) -> tuple[str, ...]:
        """The names the API answers to."""
        return self.served_model_name or (self.model,)
