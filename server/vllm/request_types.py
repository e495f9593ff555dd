"""What requests are made of, under vLLM's names: prompts as typed dictionaries, LoRA adapters and their resolvers."""

from __future__ import annotations

import inspect
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NotRequired, TypedDict, TypeVar


class _PromptKeys(TypedDict):
    """Further keys of every prompt. Media are refused when the request is made."""

    cache_salt: NotRequired[str]  # Prompts with different salts share no cached KV.
    multi_modal_data: NotRequired[Mapping[str, Any] | None]
    multi_modal_uuids: NotRequired[Mapping[str, Any] | None]
    mm_processor_kwargs: NotRequired[Mapping[str, Any] | None]


class TextPrompt(_PromptKeys):
    """A text to be tokenised."""

    prompt: str


class TokensPrompt(_PromptKeys):
    """Token ids."""

    prompt_token_ids: Sequence[int]
    prompt: NotRequired[str]  # Text of the token ids, for the output.
    token_type_ids: NotRequired[Sequence[int]]


class EmbedsPrompt(_PromptKeys):
    """Embeddings in place of tokens, with --enable-prompt-embeds."""

    prompt_embeds: Any  # Torch tensor or array [tokens, width].
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


# Plugins that find the adapter of an unknown model name.


class LoRAResolver(ABC):
    """Finds adapters."""

    @abstractmethod
    async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
        """Return the adapter of that name for a base model; None if there is none."""


class LoRAResolverRegistry:
    """The resolvers of the installed plugins, which register them when the server starts."""

    _resolvers: ClassVar[dict[str, LoRAResolver]] = {}

    @classmethod
    def register_resolver(cls, resolver_name: str, resolver: LoRAResolver) -> None:
        """Add a resolver, in place of one of the same name."""
        cls._resolvers[resolver_name] = resolver

    @classmethod
    def get_supported_resolvers(cls) -> set[str]:
        """Return the names of the resolvers."""
        return set(cls._resolvers)

    @classmethod
    def get_resolver(cls, resolver_name: str) -> LoRAResolver:
        """Return a resolver. Raises KeyError."""
        return cls._resolvers[resolver_name]

    @classmethod
    def all(cls) -> tuple[LoRAResolver, ...]:
        """Return the resolvers, in the order in which they were registered."""
        return tuple(cls._resolvers.values())


class FilesystemResolver(LoRAResolver):
    """Adapters in a folder, each in a folder of its name."""

    def __init__(self, lora_cache_dir: str) -> None:
        self.lora_cache_dir = lora_cache_dir

    async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
        """Return the adapter in the folder `lora_name` if it was made for that base model.

        A folder has one name: `./a`, `a/` and `b/../a` are not names of the adapter `a`.
        """
        root = Path(self.lora_cache_dir).resolve()
        if not lora_name or "\0" in lora_name or os.path.normpath(lora_name) != lora_name:
            return None
        folder = (root / lora_name).resolve()
        if folder == root or not folder.is_relative_to(root):
            return None
        config = _config(folder / "adapter_config.json")
        if config.get("peft_type") != "LORA" or config.get("base_model_name_or_path") != base_model_name:
            return None
        return LoRARequest(lora_name, abs(hash(lora_name)) or 1, str(folder))


def _config(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


# Options of requests, which the methods of LLM, AsyncLLM and LLMEngine have in common.


class RequestOptions(TypedDict, total=False):
    """Options of one request to AsyncLLM or LLMEngine; those without effect are vLLM's."""

    arrival_time: float | None  # Unix seconds; None: now.
    lora_request: LoRARequest | None  # The adapter, with enable_lora.
    tokenization_kwargs: Mapping[str, Any] | None  # Keys: add_special_tokens, truncate_prompt_tokens, truncation_side.
    trace_headers: Mapping[str, str] | None  # Headers traceparent and tracestate of the parent of the request's span.
    priority: int  # Smaller values run first, with scheduling_policy="priority".
    prompt_text: str | None  # The text of a prompt that is given as token ids.
    data_parallel_rank: int | None  # It has no effect: the replica is chosen by load and cached prefixes.
    session_id: str | None  # Requests with the same one run on the same replica, and their prefixes are kept longer.
    kv_hints: object  # It has no effect: the replica is chosen by load and cached prefixes.
    reasoning_ended: bool | None  # It has no effect: the prompt tells.
    reasoning_parser_kwargs: Mapping[str, Any] | None  # It has no effect: the prompt tells.


class BatchOptions(TypedDict, total=False):
    """Options of a call that generates for a list of prompts. A list is paired with the prompts."""

    use_tqdm: bool | Callable[..., Any]  # Show a progress bar on stderr, or call this like tqdm; default: True.
    lora_request: LoRARequest | Sequence[LoRARequest | None] | None  # The adapters, with enable_lora.
    priority: int | Sequence[int] | None  # Smaller values run first, with scheduling_policy="priority".
    tokenization_kwargs: Mapping[str, Any] | None  # Keys: add_special_tokens, truncate_prompt_tokens, truncation_side.
    mm_processor_kwargs: Mapping[str, Any] | None  # It is refused: this version serves text only.


class PoolingCallOptions(TypedDict, total=False):
    """Options of a call that pools a list of prompts."""

    use_tqdm: bool | Callable[..., Any]  # Show a progress bar on stderr, or call this like tqdm; default: True.
    lora_request: None  # It is refused: pooling has no adapters.
    tokenization_kwargs: Mapping[str, Any] | None  # Keys: add_special_tokens, truncate_prompt_tokens, truncation_side.
    truncate_prompt_tokens: int | None  # The same as the key of tokenization_kwargs.


MethodT = TypeVar("MethodT", bound=Callable[..., Any])


def shows_options(options: type, **defaults: object) -> Callable[[MethodT], MethodT]:
    """Decorate a method that takes `**options: Unpack[options]`: help() and inspect show the options by name.

    `defaults`: those that are not None.
    """

    def decorate(method: MethodT) -> MethodT:
        signature = inspect.signature(method)
        named_parameters = [
            parameter for parameter in signature.parameters.values() if parameter.kind is not parameter.VAR_KEYWORD
        ]
        shown = [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=defaults.get(name),
                annotation=getattr(annotation, "__forward_arg__", annotation),
            )
            for name, annotation in options.__annotations__.items()
            if name not in signature.parameters
        ]
        method.__signature__ = signature.replace(parameters=[*named_parameters, *shown])  # type: ignore[attr-defined]
        return method

    return decorate
