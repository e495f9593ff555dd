"""The body of POST /v1/completions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final

from pydantic import Field, WithJsonSchema

from pagoda.common.errors import RequestError
from pagoda.common.sampling_params import SamplingParams
from pagoda.server.protocol.base import Int64, unsupported
from pagoda.server.protocol.sampling import SamplingFields
from pagoda.server.protocol.usage import check_stream_options

MAX_PROMPTS: Final = 4096
DEFAULT_MAX_TOKENS: Final = 16

_IDS = {"type": "array", "items": {"type": "integer"}}
_TEXTS = {"type": "array", "items": {"type": "string"}}
_PROMPT_SCHEMA: dict[str, Any] = {"anyOf": [{"type": "string"}, _TEXTS, _IDS, {"type": "array", "items": _IDS}]}


class CompletionRequest(SamplingFields):
    """A text completion: one prompt or many, as text or token ids."""

    searches_beams: ClassVar[bool] = True

    prompt: Annotated[Any, WithJsonSchema(_PROMPT_SCHEMA)] = None
    echo: bool | None = False
    logprobs: Int64 | None = None
    max_tokens: Int64 | None = Field(DEFAULT_MAX_TOKENS, description="null: the default.")
    add_special_tokens: bool | None = True
    suffix: Any = unsupported(harmless=("",), why="no model served here fills in the middle of a text")
    prompt_embeds: str | list[str] | None = Field(
        None, description="Base64 of what torch.save writes of a tensor, with --enable-prompt-embeds; before `prompt`."
    )

    def check(self) -> None:
        """What no single field shows. Raises RequestError."""
        check_stream_options(self.stream, self.stream_options)
        if not self.embeds:
            return
        for name, asked in (("echo", self.echo), ("prompt_logprobs", self.prompt_logprobs is not None)):
            if asked:
                raise RequestError(name, f"{name} is about a prompt's tokens, and prompt_embeds have none; drop one")

    @property
    def embeds(self) -> list[str]:
        """The prompts that are embeddings, one entry each; their answers come first. Raises RequestError."""
        given = self.prompt_embeds
        embeds = [given] if isinstance(given, str) else given or []
        if len(embeds) > MAX_PROMPTS:
            raise RequestError(
                "prompt_embeds", f"prompt_embeds holds {len(embeds)} prompts; at most {MAX_PROMPTS} are allowed"
            )
        return embeds

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts of text or token ids, one entry each. Raises RequestError."""
        prompt = self.prompt
        if self.embeds and (prompt is None or prompt in ("", [])):
            return []
        if prompt is None:
            raise RequestError("prompt", "prompt is missing")
        if isinstance(prompt, str):
            return [prompt]
        if not isinstance(prompt, list):
            raise RequestError("prompt", "prompt must be a string, a list of strings, or token ids")
        if not prompt:
            raise RequestError("prompt", "prompt is empty")
        if _is_ids(prompt):
            return [prompt]
        if len(prompt) > MAX_PROMPTS:
            raise RequestError("prompt", f"prompt holds {len(prompt)} prompts; at most {MAX_PROMPTS} are allowed")
        if all(isinstance(each, str) for each in prompt) or all(_is_ids(each) for each in prompt):
            return prompt
        raise RequestError("prompt", "prompt must be a string, a list of strings, token ids, or lists of token ids")

    @property
    def shows_prompt_only(self) -> bool:
        """echo with max_tokens 0: nothing generated is shown."""
        return bool(self.echo) and self.max_tokens == 0

    @property
    def _max_tokens(self) -> int:
        return DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens

    def params(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """SamplingParams. `defaults`: the model's own. Raises RequestError."""
        own: dict[str, Any] = {
            "logprobs": self.logprobs,
            "max_tokens": 1 if self.shows_prompt_only else self._max_tokens,
        }
        if self.echo and self.logprobs is not None and self.prompt_logprobs is None:
            own["prompt_logprobs"] = self.logprobs
        return self.sampling_params(defaults, **own)


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(each) is int for each in value)
