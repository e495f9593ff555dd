"""Input processing: a caller's prompt and params become engine requests, tokenised, truncated and checked.

Prompts and options, the InputProcessor, checks, tokenising, and the constraints on the output, in this order. Every
refusal is a RequestError that names the field.
"""

from __future__ import annotations

import logging
import math
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from hashlib import sha256
from typing import Any, Final, Literal, TypeGuard, get_args

from pagoda.common.config.groups.model import ModelConfig
from pagoda.common.config.groups.structured_outputs import StructuredOutputsConfig
from pagoda.common.engine.lora.adapter import Adapter, AdapterRequest
from pagoda.common.engine.media.items import MediaItem, rows_items
from pagoda.common.engine.messages import EngineRequest, pooling_request
from pagoda.common.engine.sampling.rules import SamplingRules
from pagoda.common.engine.steps.contract import EMBEDDED
from pagoda.common.engine.structured_output.grammar import (
    Grammar,
    Thinking,
    closed,
    closes_safely,
    json_schema,
    no_tokenizer,
    refused,
)
from pagoda.common.engine.structured_output.guidance import guidance_text
from pagoda.common.engine.structured_output.schemas import Closing
from pagoda.common.errors import PromptTooLongError, RequestError
from pagoda.common.models.family import AnswerFormat
from pagoda.common.pooling_params import PoolingParams
from pagoda.common.request_bounds import MAX_GRAMMAR_CHARACTERS, MAX_SALT_CHARACTERS
from pagoda.common.sampling_params import SamplingParams, StructuredOutputsParams
from pagoda.common.text.chat_template import render_chat
from pagoda.common.text.literal_stretches import Span, without_start
from pagoda.common.text.tokenizer import Tokenizer
from pagoda.server.core_client.client import Load
from pagoda.server.core_client.ipc_messages import EncoderInfo, EngineInfo, PoolingInfo
from pagoda.server.parsers.parser import ReasoningFormat
from pagoda.server.parsers.registry import AUTO, NONE, reasoning_format
from pagoda.server.processing.pooling_rules import pooling_rules
from pagoda.server.processing.prompt_embeds import FIELD as EMBEDS
from pagoda.server.processing.prompt_embeds import PromptEmbeds, from_array
from pagoda.server.processing.workers.worker import TemplateRenderer
from pagoda.server.settings.extra_samplers import sampler_of
from pagoda.server.settings.plugins import param_checks, read_arguments

logger = logging.getLogger(__name__)

LISTED_PER_TOKEN: Final = 65_536
"""Biased, banned and allowed tokens that cost as much as a generated token, in each of its steps."""

COMPARED_PER_TOKEN: Final = 1024
"""Likewise tokens of banned words of several tokens, which are compared with the newest tokens."""

_DEFAULT_STRUCTURED_OUTPUTS = StructuredOutputsConfig()
_PROMPT_KEYS = frozenset({"prompt", "prompt_token_ids", "prompt_embeds", "cache_salt", "type"})
_REFUSED_KEYS = {
    **dict.fromkeys(("multi_modal_data", "multi_modal_uuids", "mm_processor_kwargs"), "this version serves text only"),
    **dict.fromkeys(("encoder_prompt", "decoder_prompt"), "the model is not an encoder-decoder model"),
}
_ENCODER = "encoder_prompt"
_DECODER = "decoder_prompt"

# Prompts and options.

Side = Literal["left", "right"]
SIDES: Final[tuple[str, ...]] = get_args(Side)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextOptions:
    """How text becomes tokens."""

    add_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None  # Number of tokens to keep; -1: as many as the model takes, None: all.
    truncation_side: Side | None = None  # The side that is cut off; None: right.

    @classmethod
    def of(cls, values: Mapping[str, Any] | None) -> TextOptions:
        """Build options from `tokenization_kwargs`. Raises RequestError naming the field."""
        known_keys = {field.name for field in fields(cls)}
        for name in values or ():
            if name not in known_keys:
                raise RequestError(
                    "tokenization_kwargs", f"unknown option {str(name)[:40]!r}; use {', '.join(sorted(known_keys))}"
                )
        options = cls(**(values or {}))
        keep = options.truncate_prompt_tokens
        if keep is not None and (type(keep) is not int or keep < -1):
            raise RequestError("truncate_prompt_tokens", "truncate_prompt_tokens must be an integer of -1 or more")
        if options.truncation_side is not None and options.truncation_side not in SIDES:
            raise RequestError("truncation_side", f"truncation_side must be one of {', '.join(SIDES)}")
        return options

    @classmethod
    def of_sampling(cls, params: SamplingParams) -> TextOptions:
        """Return the options that sampling params set; they cut the left side by default."""
        side: Side = "right" if params.truncation_side == "right" else "left"
        return cls(truncate_prompt_tokens=params.truncate_prompt_tokens, truncation_side=side)

    def keep(self, max_tokens: int, reserved: int = 0) -> int | None:
        """Return how many tokens of a prompt are kept, None for all; -1 leaves `reserved` tokens of `max_tokens` free.

        Raises RequestError if more than `max_tokens` are to be kept.
        """
        keep = self.truncate_prompt_tokens
        if keep is None:
            return None
        if keep > max_tokens:
            raise RequestError(
                "truncate_prompt_tokens",
                f"truncate_prompt_tokens {keep} is above the model's context of {max_tokens} tokens",
            )
        return max(1, max_tokens - reserved) if keep == -1 else keep


@dataclass(frozen=True, slots=True)
class RequestOrigin:
    """The caller's request that a prompt is of."""

    owner: str = ""  # A digest of the API key that sent it; "": the server has no keys.
    group: str = ""  # Id that all its prompts share; "": it has one prompt.
    prompts: int = 1
    cache_key: str = ""  # See `cache_key_of`.


_CACHE_KEY_DIGITS: Final = 16


def cache_key_of(hint: str | None, owner: str = "") -> str:
    """Return the digest of what a client names a conversation or a user by; "" without a name.

    Requests with the same one share prefixes. Of two owners none is the same.
    """
    if not hint:
        return ""
    return sha256(f"{owner}\0{hint}".encode("utf-8", "surrogatepass")).hexdigest()[:_CACHE_KEY_DIGITS]


ALONE: Final = RequestOrigin()

PLAIN: Final = TextOptions()
"""Special tokens as the tokenizer adds them, nothing truncated."""


@dataclass(frozen=True, slots=True)
class EncoderPrompt:
    """What the encoder of an encoder-decoder model reads."""

    text: str | None  # None if the caller gave token ids only.
    token_ids: list[int]


@dataclass(frozen=True, slots=True)
class Prompt:
    """A tokenised prompt; with `encoder`, what the decoder starts from."""

    text: str | None  # None if the caller gave token ids only, and for pooling.
    token_ids: list[int]  # Zeros if `embeds` stand in place of tokens.
    cache_salt: str | None = None
    embeds: PromptEmbeds | None = None
    second_text: int | None = None  # First token of the second text (token type 1) of a pair for pooling.
    encoder: EncoderPrompt | None = None  # The prompt of an encoder-decoder model's encoder.
    literal: tuple[Span, ...] = ()  # Spans of `text` in which special tokens are ordinary text.
    stable_tokens: int | None = None  # First tokens that the conversation's next prompt repeats; None: all.

    @property
    def known_ids(self) -> list[int]:
        """Tokens whose text precedes the output: none for embeddings."""
        return [] if self.embeds is not None else self.token_ids


PromptType = str | Sequence[int] | Mapping[str, Any] | Prompt
"""Text, token ids, {"prompt": text}, {"prompt_token_ids": ids} or {"prompt_embeds": rows}; mappings may carry
"cache_salt". A Prompt is tokenised and truncated already. Of an encoder-decoder model it is the encoder's prompt, which
{"encoder_prompt": ..., "decoder_prompt": ...} gives together with the decoder's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairTemplate:
    """A jinja template for pairs, which are messages of roles `query` and `document`."""

    source: str
    keywords: Mapping[str, Any]  # Further template variables.


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A caller's request: its prompt, its params, and one engine request per completion (one for pooling)."""

    request_id: str
    prompt: Prompt
    params: SamplingParams | PoolingParams
    children: list[EngineRequest]
    arrival_time: float  # Unix seconds.
    arrival: float  # Monotonic seconds.
    lora_request: AdapterRequest | None = None  # As the caller of the Python API gave it, for outputs.
    trace_parent: Any = None  # An opentelemetry Context, with --otlp-traces-endpoint.

    @property
    def load(self) -> Load:
        """What the request uses of the queue."""
        prompt = self.prompt
        sequences = len(self.children)
        encoded = 0 if prompt.encoder is None else len(prompt.encoder.token_ids)
        return Load(sequences, sequences * (len(prompt.token_ids) + encoded))


# Requests.


def check_extras(*, lora_request: object = None, mm_processor_kwargs: Mapping[str, Any] | None = None) -> None:
    """Raise RequestError naming a parameter that pooling, or this version, does not support."""
    if lora_request is not None:
        raise RequestError("lora_request", "lora_request: pooling has no adapters; merge it into the checkpoint")
    if mm_processor_kwargs:
        raise RequestError("mm_processor_kwargs", "mm_processor_kwargs is not supported: this version serves text only")


def text_options(values: Mapping[str, Any] | None) -> TextOptions | None:
    """Return the options of `tokenization_kwargs`; None if there are none. Raises RequestError naming the field."""
    return None if values is None else TextOptions.of(values)


def with_text(prompt: PromptType, text: str | None) -> PromptType:
    """Return a prompt whose text is given apart from its token ids."""
    if text is None or isinstance(prompt, str | Prompt):
        return prompt
    tokens = dict(prompt) if isinstance(prompt, Mapping) else {"prompt_token_ids": list(prompt)}
    return {**tokens, "prompt": text}


class InputProcessor:
    """Turns prompts and params into engine requests for one model, generating or pooling.

    `max_cost`: maximum `request_cost`; None: no limit.
    """

    def __init__(
        self,
        config: ModelConfig,
        info: EngineInfo,
        tokenizer: Tokenizer | None,
        structured: StructuredOutputsConfig = _DEFAULT_STRUCTURED_OUTPUTS,
        max_cost: int | None = None,
    ) -> None:
        self.templates = TemplateRenderer()
        self._info = info
        self._max_cost = max_cost
        self._tokenizer = tokenizer
        self._structured = structured
        self.read_reasoning_as(_reasoning_format(structured, info.answers, tokenizer))
        self._max_output: int | None = info.sampling_defaults.get("max_tokens")  # The maximum of the generation config.
        self._max_logprobs = info.vocab_size if config.max_logprobs == -1 else min(config.max_logprobs, info.vocab_size)
        self._read_arguments = read_arguments(config)
        self._named_unread = False
        self._param_checks = param_checks(config)
        self._seeds = random.Random(config.seed)  # Requests without a seed differ, and runs repeat.
        self._reserved = 1 if info.pooling is None else 0  # Positions of the context that the output needs.
        main = tokenizer.eos_token_id if tokenizer is not None else None
        if main is None and info.eos_token_ids:
            main = info.eos_token_ids[0]
        self._main_eos = frozenset() if main is None else frozenset({main})
        ends = () if tokenizer is None else map(tokenizer.backend.token_to_id, info.answers.ends)
        self._all_eos = self._main_eos | {*info.eos_token_ids, *(token for token in ends if token is not None)}

    def read_reasoning_as(self, format: ReasoningFormat | None) -> None:
        """Take the reasoning of later requests to have this format. None: there is no reasoning."""
        self._constraints = OutputConstraints(self._structured, self._tokenizer, format)

    @property
    def end_token_ids(self) -> frozenset[int]:
        """Tokens that end a sequence, unless a request ignores them."""
        return self._all_eos

    @property
    def pooling(self) -> PoolingInfo:
        """What the pooling model offers. Raises RequestError if the model generates."""
        if self._info.pooling is None:
            raise RequestError(
                "model", "this model generates text; for embeddings, labels or scores, start it with --runner pooling"
            )
        return self._info.pooling

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises RequestError if it is switched off."""
        if self._tokenizer is None:
            raise RequestError("prompt", "the tokenizer is switched off (skip_tokenizer_init); give prompt_token_ids")
        return self._tokenizer

    def check_pools(self) -> None:
        """Raise RequestError if the model generates."""
        _ = self.pooling

    def check_generates(self) -> None:
        """Raise RequestError if the model was started for pooling."""
        if self._info.pooling is not None:
            raise RequestError(
                "model", "this model was started for pooling and generates no text; start it with --runner generate"
            )

    def prepare(
        self,
        request_id: str,
        prompt: PromptType,
        params: SamplingParams | PoolingParams,
        priority: int = 0,
        *,
        text: TextOptions | None = None,
        arrival_time: float | None = None,
        adapter: Adapter | None = None,
        origin: RequestOrigin = ALONE,
    ) -> PreparedRequest:
        """Return the engine requests of a prompt, its params verified once. Raises RequestError.

        `text`: how to tokenise; None: as the params say. `arrival_time`: Unix seconds; None: now. `adapter`: the LoRA
        adapter of the request, of generating models. `origin`: the caller's request that the prompt is of.
        """
        now = time.time()
        arrival = time.monotonic()
        if arrival_time is None:
            arrival_time = now
        arrival -= max(0.0, now - arrival_time)
        if isinstance(params, PoolingParams):
            info = self.pooling
            ready = self.parse(prompt, text or PLAIN)
            self._check_prompt(ready)
            rules = pooling_rules(info, params, ready.second_text)
            children = [pooling_request(request_id, ready.token_ids, rules, priority=priority, arrival=arrival)]
        else:
            self.check_generates()
            params.verify()
            ready = self.parse(prompt, text or TextOptions.of_sampling(params))
            self._check_prompt(ready)
            self._check_params(ready, params)
            children = self._children(request_id, ready, params, priority, arrival, adapter, origin)
        return PreparedRequest(request_id, ready, params, children, arrival_time, arrival)

    def parse(self, prompt: PromptType, options: TextOptions = PLAIN) -> Prompt:
        """Tokenise and truncate a prompt of any accepted form. Raises RequestError."""
        if (encoder := self._info.encoder) is not None:
            return self._for_both(encoder, prompt, options)
        keep = options.keep(self._info.limits.max_model_len, self._reserved)
        return self._parse(prompt, options, keep, self._check_count)

    def padded(self, prompt: Prompt) -> Prompt:
        """Return a prompt with padding tokens up to the model's context. Raises RequestError if there is none."""
        padding = self.tokenizer.pad_token_id
        if padding is None:
            raise RequestError("padding", "padding needs a padding token, which the model's tokenizer has not")
        missing = self._info.limits.max_model_len - self._reserved - len(prompt.token_ids)
        return replace(prompt, token_ids=prompt.token_ids + [padding] * max(0, missing))

    def _for_both(self, encoder: EncoderInfo, prompt: PromptType, options: TextOptions) -> Prompt:
        """Return the prompt of an encoder-decoder model; `options` are for the encoder's part."""
        if isinstance(prompt, Prompt) and prompt.encoder is not None:
            return prompt
        read_prompt: PromptType = prompt
        decoder: PromptType | None = None
        if isinstance(prompt, Mapping) and _ENCODER in prompt:
            if others := [str(key) for key in prompt if key not in (_ENCODER, _DECODER)]:
                raise RequestError(others[0], f"unknown prompt key {others[0]!r} beside '{_ENCODER}' and '{_DECODER}'")
            read_prompt = prompt[_ENCODER]
            decoder = prompt.get(_DECODER)
        check = partial(_check_encoder_count, encoder.max_tokens)
        read = self._parse(read_prompt, options, options.keep(encoder.max_tokens), check)
        if not read.token_ids:
            raise RequestError("prompt", "the encoder's prompt is empty: it has no tokens")
        check(len(read.token_ids))
        check_token_ids("prompt", read.token_ids, self._info.vocab_size)
        both = EncoderPrompt(read.text, read.token_ids)
        if decoder is None:
            return replace(read, text=None, token_ids=list(encoder.decoder_start), encoder=both)
        decoder_prompt = self._parse(decoder, TextOptions(add_special_tokens=False), None, self._check_count)
        start = list(encoder.decoder_start[:1])
        ids = decoder_prompt.token_ids if decoder_prompt.token_ids[:1] == start else start + decoder_prompt.token_ids
        return replace(read, text=decoder_prompt.text, token_ids=ids, encoder=both)

    def _parse(
        self, prompt: PromptType, options: TextOptions, keep: int | None, check: Callable[[int], None]
    ) -> Prompt:
        """Tokenise one part of a prompt. `check`: raises RequestError for a number of tokens that is too large."""
        if isinstance(prompt, Prompt):
            return prompt
        if isinstance(prompt, str):
            return self._encoded(prompt, options, keep)
        if not isinstance(prompt, Mapping):
            return _token_prompt("prompt", prompt, options, keep, check)
        check_keys(prompt)
        salt = prompt.get("cache_salt")
        text = prompt.get("prompt")
        if salt is not None and not (isinstance(salt, str) and salt):
            raise RequestError("cache_salt", "cache_salt must be a non-empty string")
        if salt is not None and len(salt) > MAX_SALT_CHARACTERS:
            raise RequestError("cache_salt", f"cache_salt must have at most {MAX_SALT_CHARACTERS} characters")
        if text is not None and not isinstance(text, str):
            raise RequestError("prompt", f"prompt must be a string, not {type(text).__name__}")
        if prompt.get("prompt_embeds") is not None:
            return self._embedded(prompt, options, keep)
        if (ids := prompt.get("prompt_token_ids")) is not None:
            ready = _token_prompt("prompt_token_ids", ids, options, keep, check)
            return replace(ready, text=text, cache_salt=salt)
        if text is None:
            raise RequestError("prompt", "the prompt has neither 'prompt' nor 'prompt_token_ids'")
        return replace(self._encoded(text, options, keep), cache_salt=salt)

    def pair(
        self, first: str, second: str, options: TextOptions = PLAIN, template: PairTemplate | None = None
    ) -> Prompt:
        """Return two texts as one prompt, as a cross-encoder reads them. Raises RequestError."""
        keep = options.keep(self._info.limits.max_model_len, self._reserved)
        tokenizer = self.tokenizer
        if template is not None:
            messages = [{"role": "query", "content": first}, {"role": "document", "content": second}]
            text = render_chat(
                tokenizer,
                messages,
                template=template.source,
                renderer=self.templates.render,
                add_generation_prompt=False,
                **template.keywords,
            )
            return self._encoded(text, options, keep)
        if self.pooling.pairs == "concatenated":
            return self._encoded(first + second, options, keep)
        ids, second_text = encode_pair(tokenizer, first, second, keep=keep, side=options.truncation_side)
        return Prompt(None, ids, second_text=second_text)

    def _encoded(self, text: str, options: TextOptions, keep: int | None) -> Prompt:
        special = options.add_special_tokens
        side = options.truncation_side
        if self._info.pooling is not None:  # Special tokens survive truncation.
            return Prompt(None, encode(self.tokenizer, text, special=special, keep=keep, side=side))
        return Prompt(text, _encode_cut(self.tokenizer, text, special, keep, side))

    def _embedded(self, prompt: Mapping[str, Any], options: TextOptions, keep: int | None) -> Prompt:
        if self._info.pooling is not None:
            raise RequestError(EMBEDS, "prompt_embeds are for models that generate; give text or token ids")
        if prompt.get("prompt_token_ids") is not None:
            raise RequestError(EMBEDS, "a prompt has prompt_embeds or prompt_token_ids, not both")
        values = prompt[EMBEDS]
        embeds = values if isinstance(values, PromptEmbeds) else from_array(values, self._info, keep)
        if keep is not None and keep < embeds.count:
            start = embeds.count - keep if options.truncation_side == "left" else 0
            embeds = embeds.part(slice(start, start + keep))
        return Prompt(prompt.get("prompt"), [0] * embeds.count, prompt.get("cache_salt"), embeds)

    def _check_count(self, count: int) -> None:
        limit = self._info.limits.max_model_len
        longest = self._info.limits.max_model_len - self._reserved
        if count > longest:  # Clients recognise the first words and shorten the conversation.
            output = ", and the answer needs at least 1" if self._reserved else ""
            raise PromptTooLongError(
                "prompt",
                f"This model's maximum context length is {limit} tokens, but the prompt is too long: {count} tokens"
                f"{output}; shorten it to {longest} or set truncate_prompt_tokens",
                num_tokens=count,
                limit=longest,
            )

    def _check_prompt(self, prompt: Prompt) -> None:
        if not prompt.token_ids:
            raise RequestError("prompt", "the prompt is empty: it has no tokens")
        self._check_count(len(prompt.token_ids))
        check_token_ids("prompt", prompt.token_ids, self._info.vocab_size)

    def _check_params(self, prompt: Prompt, params: SamplingParams) -> None:
        left = self._info.limits.max_model_len - len(prompt.token_ids)
        vocab = self._info.vocab_size
        if params.max_tokens is None and params.min_tokens > left:
            raise RequestError("min_tokens", f"min_tokens {params.min_tokens} does not fit the {left} left")
        if self._max_output is not None and params.min_tokens > self._max_output:
            raise RequestError(
                "min_tokens",
                f"min_tokens {params.min_tokens} is above what the generation config allows, {self._max_output}",
            )
        for name, count in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
            if count is not None and (vocab if count == -1 else count) > self._max_logprobs:
                shown = "-1 (the whole vocabulary)" if count == -1 else count
                raise RequestError(
                    name, f"{name} {shown} is above the server's limit of {self._max_logprobs} (--max-logprobs)"
                )
        if prompt.embeds is not None and params.prompt_logprobs is not None:
            raise RequestError("prompt_logprobs", "prompt_logprobs need tokens, which prompt_embeds replace; drop one")
        if params.extra_args:
            self._check_extra_args(params.extra_args)
        for check in self._param_checks:
            try:
                check(params)
            except ValueError as error:
                raise RequestError("extra_args", str(error)) from error
        for name, words in (("stop", params.stop_strings), ("bad_words", params.bad_words)):
            if words and self._tokenizer is None:
                raise RequestError(name, f"{name} needs a tokenizer, which is switched off (skip_tokenizer_init)")

    def unread(self, extra_args: Mapping[str, Any]) -> list[str]:
        """Return the entries of `extra_args` that no logits processor reads."""
        read_arguments = self._read_arguments
        return [] if read_arguments is None else [name for name in extra_args if name not in read_arguments]

    def _check_extra_args(self, extra_args: Mapping[str, Any]) -> None:
        unread = self.unread(extra_args)
        for name in unread:
            if (sampler := sampler_of(name)) is not None:
                raise RequestError(
                    name,
                    f"{name} is not supported: no logits processor reads it; leave it out, or start the server with "
                    f"--logits-processors {sampler}",
                )
        if unread and not self._named_unread:
            self._named_unread = True
            logger.warning("extra_args have no effect, no logits processor reads them: %s", repr(unread)[1:-1][:200])

    def _children(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        priority: int,
        arrival: float,
        adapter: Adapter | None,
        origin: RequestOrigin,
    ) -> list[EngineRequest]:
        max_tokens = self._info.limits.max_model_len - len(prompt.token_ids)
        max_tokens = max_tokens if self._max_output is None else min(max_tokens, self._max_output)
        eos = frozenset() if params.ignore_eos else self._all_eos
        grammar = self._constraints.grammar(params)
        thinking = self._constraints.thinking(params, prompt.text, prompt.known_ids)
        rules = params.rules(
            vocab_size=self._info.vocab_size,
            eos_token_ids=eos,
            bad_words_token_ids=bad_words_token_ids(params.bad_words, self.tokenizer) if params.bad_words else (),
            default_seed=self._seeds.getrandbits(63),
            verify=False,
        )
        ends = eos | frozenset(params.stop_token_ids or ())
        if params.max_tokens is not None:
            max_tokens = min(params.max_tokens, max_tokens)
        embeds = prompt.embeds
        encoder = prompt.encoder
        token_ids = prompt.token_ids
        media: tuple[MediaItem, ...] = ()
        if embeds is not None:
            token_ids = [EMBEDDED] * embeds.count
            page = self._info.limits.block_size
            media = rows_items(embeds.rows, count=embeds.count, dtype=self._info.dtype, rows_per_item=page)
        prompt_tokens = len(token_ids) + (0 if encoder is None else len(encoder.token_ids))
        if self._max_cost is not None:
            _check_cost(params.n * origin.prompts, prompt_tokens, max_tokens, rules, self._max_cost)
        ids = [request_id] if params.n == 1 else [f"{index}_{request_id}" for index in range(params.n)]
        return [
            EngineRequest(
                request_id=child_id,
                prompt_token_ids=token_ids,
                rules=params.rules_of(index, rules),
                max_tokens=max_tokens,
                stop_token_ids=ends,
                eos_token_ids=frozenset() if params.ignore_eos else self._main_eos,
                priority=priority,
                arrival=arrival,
                cache_salt=prompt.cache_salt,
                skip_reading_prefix_cache=bool(params.skip_reading_prefix_cache),
                stable_tokens=prompt.stable_tokens,
                grammar=grammar,
                thinking=thinking,
                media=media,
                encoder_token_ids=None if encoder is None else encoder.token_ids,
                adapter=adapter,
                owner=origin.owner,
                group=origin.group or (request_id if params.n > 1 else ""),
                cache_key=origin.cache_key,
            )
            for index, child_id in enumerate(ids)
        ]


def _token_prompt(
    field: str, ids: object, options: TextOptions, keep: int | None, check: Callable[[int], None]
) -> Prompt:
    if keep is None and isinstance(ids, list):
        check(len(ids))  # This precedes the check of what may be millions of ids.
    token_ids = checked_token_ids(field, ids)
    return Prompt(None, token_ids if keep is None else cut(token_ids, keep, options.truncation_side))


def max_prompt_tokens(info: EngineInfo) -> int:
    """Return the context that prompts are read in: the encoder's, or else the one that the output shares."""
    return info.limits.max_model_len if info.encoder is None else info.encoder.max_tokens


# Checks of prompts and params.


def is_token_ids(value: object) -> TypeGuard[Sequence[int]]:
    """Return True for a sequence of integers, which is one prompt, not many."""
    return isinstance(value, Sequence) and not isinstance(value, str) and bool(value) and isinstance(value[0], int)


def check_token_ids(field: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """Raise RequestError naming `field` for ids that are not in the vocabulary."""
    low = min(token_ids, default=0)
    high = max(token_ids, default=0)
    if low < 0 or high >= vocab_size:
        bad = low if low < 0 else high
        raise RequestError(field, f"token id {bad} is out of vocabulary: ids are 0 to {vocab_size - 1}")


def check_keys(prompt: Mapping[str, Any]) -> None:
    """Raise RequestError for unknown or unsupported keys of a prompt."""
    for key, value in prompt.items():
        if key in _REFUSED_KEYS and value is not None:
            raise RequestError(key, f"{key} is not supported: {_REFUSED_KEYS[key]}")
        if key not in _PROMPT_KEYS and key not in _REFUSED_KEYS:
            raise RequestError(
                str(key), f"unknown prompt key {key!r}; use 'prompt', 'prompt_token_ids' or 'prompt_embeds'"
            )


def checked_token_ids(field: str, value: object) -> list[int]:
    """Return a list of integers. Raises RequestError naming the field."""
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise RequestError(field, f"{field} must be text or a list of token ids, not {type(value).__name__}")
    ids = list(value)
    for token in ids:
        if type(token) is not int:
            raise RequestError(field, f"{field} must hold integers only, not {type(token).__name__}")
    return ids


def _check_encoder_count(limit: int, count: int) -> None:
    if count > limit:
        raise PromptTooLongError(
            "prompt",
            f"This model's maximum context length is {limit} tokens for the encoder, but the prompt is too long: "
            f"{count} tokens; shorten it to {limit} or set truncate_prompt_tokens",
            num_tokens=count,
            limit=limit,
        )


def request_cost(sequences: int, prompt_tokens: int, max_tokens: int, rules: SamplingRules) -> int:
    """Return the cost of a request in tokens. `sequences`: n x prompts, each with such a prompt."""
    listed = len(rules.allowed_token_ids or ()) + len(rules.logit_bias) + len(rules.bad_words)
    compared = sum(len(word) - 1 for word in rules.bad_words)
    per_token = 1 + listed / LISTED_PER_TOKEN + compared / COMPARED_PER_TOKEN
    return math.ceil(sequences * (prompt_tokens + max_tokens * per_token))


def _check_cost(sequences: int, prompt_tokens: int, max_tokens: int, rules: SamplingRules, limit: int) -> None:
    """Raise RequestError if a request costs more than `limit` tokens. It names the field that contributes most."""
    cost = request_cost(sequences, prompt_tokens, max_tokens, rules)
    if cost <= limit:
        return
    alone = request_cost(1, prompt_tokens, max_tokens, rules)
    plain = request_cost(1, prompt_tokens, max_tokens, SamplingRules())
    lists = {
        "logit_bias": len(rules.logit_bias),
        "allowed_token_ids": len(rules.allowed_token_ids or ()),
        "bad_words": sum(map(len, rules.bad_words)),
    }
    field = max(lists, key=lists.__getitem__) if alone > 2 * plain else "n" if sequences > 1 else "max_tokens"
    raise RequestError(
        field,
        f"the request costs up to {cost} tokens ({sequences} sequences of {prompt_tokens} prompt tokens and up to "
        f"{max_tokens} generated ones, with what logit_bias, allowed_token_ids and bad_words add), above the limit of "
        f"{limit} (--max-request-cost); lower {field}",
    )


# Tokenising: the text is cut, not the special tokens around it, except by `encode_kept`.


def encode_kept(
    tokenizer: Tokenizer,
    text: str,
    params: SamplingParams,
    max_model_len: int,
    add_special_tokens: bool = True,
    literal: Sequence[Span] = (),
) -> list[int]:
    """Return the token ids of a text, truncated as `params` specify. Raises RequestError.

    `literal`: special tokens in the text that are not parsed.
    """
    options = TextOptions.of_sampling(params)
    keep = options.keep(max_model_len, reserved=1)
    return _encode_cut(tokenizer, text, add_special_tokens, keep, options.truncation_side, literal)


def _encode_cut(
    tokenizer: Tokenizer,
    text: str,
    special: bool,
    keep: int | None,
    side: Side | None,
    literal: Sequence[Span] = (),
) -> list[int]:
    """Return at most `keep` token ids of a text; special tokens are cut like others."""
    if keep is None:
        return tokenizer.encode_literal(text, literal, special)
    part = tokenizer.pre_truncate(text, keep, side or "right")
    if side == "left" and literal:
        literal = without_start(literal, len(text) - len(part))
    return cut(tokenizer.encode_literal(part, literal, special), keep, side)


def encode(tokenizer: Tokenizer, text: str, *, special: bool, keep: int | None, side: Side | None) -> list[int]:
    """Return at most `keep` token ids of a text, special tokens included."""
    if keep is not None:
        text = tokenizer.pre_truncate(text, keep, side or "right")
    ids = tokenizer.encode(text, special)
    if keep is None or len(ids) <= keep:
        return ids
    inner = tokenizer.encode(text, False) if special else ids
    start = _find(inner, ids, 0)
    budget = _text_budget(keep, len(ids) - len(inner))
    return ids[:start] + cut(inner, budget, side) + ids[start + len(inner) :]


def encode_pair(
    tokenizer: Tokenizer, first: str, second: str, *, keep: int | None, side: Side | None
) -> tuple[list[int], int | None]:
    """Return at most `keep` token ids of a pair, and where token type 1 begins. The longer text is cut first."""
    if keep is not None:
        first, second = (tokenizer.pre_truncate(text, keep, side or "right") for text in (first, second))
    ids, type_one = tokenizer.encode_pair(first, second)
    if keep is None or len(ids) <= keep:
        return ids, type_one
    one = tokenizer.encode(first, False)
    two = tokenizer.encode(second, False)
    start = _find(one, ids, 0)
    middle = _find(two, ids, start + len(one))
    budget = _text_budget(keep, len(ids) - len(one) - len(two))
    keep_one, keep_two = _split_pair(len(one), len(two), budget)
    before = ids[:start]
    between = ids[start + len(one) : middle]
    after = ids[middle + len(two) :]
    shortened_ids = [*before, *cut(one, keep_one, side), *between, *cut(two, keep_two, side), *after]
    return shortened_ids, None if type_one is None else type_one - (len(one) - keep_one)


def shortened(tokenizer: Tokenizer, text: str, max_tokens: int) -> str:
    """Return the prefix of a text that is its first `max_tokens` tokens; 0: all of it."""
    if not max_tokens:
        return text
    offsets = tokenizer.offsets(tokenizer.pre_truncate(text, max_tokens, "right"), False)
    return text if len(offsets) <= max_tokens else text[: offsets[max_tokens - 1][1]]


def cut(ids: Sequence[int], count: int, side: Side | None) -> list[int]:
    """Return the first `count` ids, or the last if the left side is cut off."""
    return list(ids[len(ids) - count :] if side == "left" else ids[:count]) if count < len(ids) else list(ids)


def _split_pair(one: int, two: int, budget: int) -> tuple[int, int]:
    """Return how much of two lengths is kept, taking from the longer until they fit."""
    if one > two:
        return _split_pair(two, one, budget)[::-1]
    shorter = min(one, budget // 2)
    return shorter, budget - shorter


def _text_budget(keep: int, special: int) -> int:
    if keep <= special:
        raise RequestError(
            "truncate_prompt_tokens",
            f"truncate_prompt_tokens {keep} leaves no room for text beside {special} special tokens",
        )
    return keep - special


def _find(part: Sequence[int], ids: Sequence[int], start: int) -> int:
    """Return the index of a text's own tokens among all."""
    for index in range(start, len(ids) - len(part) + 1):
        if list(ids[index : index + len(part)]) == list(part):
            return index
    raise RequestError("truncate_prompt_tokens", "this model's tokenizer cannot truncate texts; shorten the text")


def bad_words_token_ids(words: Sequence[str], tokenizer: Tokenizer) -> list[list[int]]:
    """Return the token ids of each word, at the start of a text and after a space, without duplicates.

    Tokenizers encode the two differently. A word without tokens is dropped.
    """
    sequences: dict[tuple[int, ...], None] = {}
    for word in words:
        for text in (word, " " + word.lstrip()):
            ids = tuple(tokenizer.encode(text, add_special_tokens=False))
            sequences[ids] = None
    return [list(ids) for ids in sequences if ids]


# The grammar that constrains the output, and the reasoning that may precede it.


def _reasoning_format(
    config: StructuredOutputsConfig, answers: AnswerFormat, tokenizer: Tokenizer | None
) -> ReasoningFormat | None:
    """Return the format of --reasoning-parser, else the family's fixed one. Raise ConfigError for an unknown one."""
    name = config.reasoning_parser
    if name in ("", AUTO):
        name = answers.reasoning if answers.fixed else ""
    return reasoning_format(name, config.reasoning_parser_plugin, tokenizer) if name not in ("", NONE) else None


class OutputConstraints:
    """Builds grammars and reasoning constraints for one model."""

    def __init__(
        self, config: StructuredOutputsConfig, tokenizer: Tokenizer | None, format: ReasoningFormat | None = None
    ) -> None:
        """`format`: of the model's reasoning; None: it has none."""
        self._config = config
        self._tokenizer = tokenizer
        self._format = format

    def grammar(self, params: SamplingParams) -> Grammar | None:
        """Return the grammar of the output; None: unconstrained. Raises RequestError."""
        if params.structured_outputs is None:
            return None
        if self._tokenizer is None:
            raise no_tokenizer()
        return grammar_of(params.structured_outputs, self._config, self._special)

    def thinking(self, params: SamplingParams, text: str | None, token_ids: list[int]) -> Thinking | None:
        """Return the reasoning that the engine must track, if any. `text`: the prompt's; None: only its ids are known.

        Raises RequestError for a budget without a reasoning parser.
        """
        budget = None if params.thinking_token_budget == -1 else params.thinking_token_budget
        if budget is not None and (self._format is None or self._tokenizer is None):
            raise RequestError(
                "thinking_token_budget", "thinking_token_budget needs a server with a --reasoning-parser"
            )
        if self._format is None or self._tokenizer is None or (budget is None and params.structured_outputs is None):
            return None
        prompt = text if text is not None else self._tokenizer.decode(token_ids, skip_special_tokens=False)
        is_open = self._format.thinks(prompt)
        ends = _sequences(self._tokenizer, (*self._config.reasoning_end, *self._format.ends))
        if not ends or not (is_open or self._may_start(self._format, prompt)):
            return None
        return Thinking(
            ends=ends,
            open=is_open,
            starts=()
            if is_open
            else _sequences(self._tokenizer, (*self._config.reasoning_start, *self._format.starts)),
            budget=budget,
            in_grammar=self._config.is_on("enable_in_reasoning"),
        )

    def _may_start(self, format: ReasoningFormat, prompt: str) -> bool:
        """Return True if reasoning may still start: the prompt has not ended it."""
        return not prompt.rstrip().endswith(format.ends) and any(
            format.thinks(prompt + start) for start in format.starts
        )

    @cached_property
    def _special(self) -> dict[str, int]:
        assert self._tokenizer is not None
        tokens = self._tokenizer.backend.get_added_tokens_decoder()
        return {token.content: number for number, token in tokens.items() if token.special}


def _sequences(tokenizer: Tokenizer, texts: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    """Return the token ids of each text, without texts that have none."""
    sequences = (tuple(tokenizer.encode(text, add_special_tokens=False)) for text in texts)
    return tuple(sequence for sequence in sequences if sequence)


def grammar_of(params: StructuredOutputsParams, config: StructuredOutputsConfig, special: Mapping[str, int]) -> Grammar:
    """Return the engine's grammar. `special`: text of each special token -> its id. Raises RequestError."""
    params = replace(
        params,
        disable_any_whitespace=params.disable_any_whitespace or config.is_on("disable_any_whitespace"),
        disable_additional_properties=(
            params.disable_additional_properties or config.is_on("disable_additional_properties")
        ),
    )
    closing: Closing = "no" if "disable_additional_properties" in config.structured_outputs_config else "safe"
    if config.engine == "xgrammar":
        from pagoda.common.engine.structured_output.xgrammar import xgrammar_text

        if params.json is not None and closing == "safe":
            schema = json_schema(params.json)
            params = replace(params, json=closed(schema) if closes_safely(schema) else schema)
        text = xgrammar_text(params)
    else:
        text = guidance_text(params, special, closing=closing)
    if len(text) > MAX_GRAMMAR_CHARACTERS:
        raise refused(f"the grammar has {len(text)} characters; at most {MAX_GRAMMAR_CHARACTERS} are allowed")
    return Grammar(text, config.engine)
