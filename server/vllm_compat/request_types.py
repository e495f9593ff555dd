"""What requests are made of, under vLLM's names: prompts as typed dictionaries, and the LoRA adapter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NotRequired, TypedDict


class _PromptKeys(TypedDict):
    """Further keys of every prompt. Media are refused when the request is made."""

    cache_salt: NotRequired[str]  # prompts with different ones share no cached KV
    multi_modal_data: NotRequired[Mapping[str, Any] | None]
    multi_modal_uuids: NotRequired[Mapping[str, Any] | None]
    mm_processor_kwargs: NotRequired[Mapping[str, Any] | None]


class TextPrompt(_PromptKeys):
    """A text to be tokenised."""

    prompt: str


class TokensPrompt(_PromptKeys):
    """Token ids."""

    prompt_token_ids: Sequence[int]
    prompt: NotRequired[str]  # their text, for the output
    token_type_ids: NotRequired[Sequence[int]]


class EmbedsPrompt(_PromptKeys):
    """Embeddings in place of tokens, with --enable-prompt-embeds."""

    prompt_embeds: Any  # torch tensor or array [tokens, width]
    prompt: NotRequired[str]


class ExplicitEncoderDecoderPrompt(TypedDict):
    """What the encoder reads, and what the decoder starts from."""

    encoder_prompt: str | TextPrompt | TokensPrompt
    decoder_prompt: str | TextPrompt | TokensPrompt | None


@dataclass(frozen=True, slots=True, eq=False)
class LoRARequest:
    """An adapter by name; requests are equal if their names are. Raises ValueError for an id below 1 or no path."""

    lora_name: str
    lora_int_id: int
    lora_path: str = ""
    base_model_name: str | None = None
    load_inplace: bool = False
    is_3d_lora_weight: bool = False

    def __post_init__(self) -> None:
        if self.lora_int_id < 1:
            raise ValueError(f"lora_int_id must be at least 1, not {self.lora_int_id}")
        if not self.lora_path:
            raise ValueError("lora_path must not be empty")

    @property
    def adapter_id(self) -> int:
        return self.lora_int_id

    @property
    def name(self) -> str:
        return self.lora_name

    @property
    def path(self) -> str:
        return self.lora_path

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LoRARequest) and self.lora_name == other.lora_name

    def __hash__(self) -> int:
        return hash(self.lora_name)
