"""From what a caller passes as a prompt to the engine's requests: tokenised, truncated, checked against the model.

Every refusal is a RequestError that names the field. Knows the model's limits, not its device.
"""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeGuard

from pagoda.common.config.engine import EngineConfig
from pagoda.common.config.groups.model import ModelConfig
from pagoda.common.config.groups.structured_outputs import StructuredOutputsConfig
from pagoda.common.engine.messages import EngineRequest
from pagoda.common.engine.sampling import SamplingRules
from pagoda.common.engine.step import EMBEDDED
from pagoda.common.errors import ModelError, RequestError
from pagoda.common.sampling_params import SamplingParams
from pagoda.common.text.tokenizer import Tokenizer, load_tokenizer
from pagoda.common.weights.gguf.file import pick_gguf
from pagoda.common.weights.hub import resolve_model
from pagoda.server.ipc_messages import EngineInfo
from pagoda.server.processing.output_constraints import AnswerForms
from pagoda.server.processing.prompt_embeds import FIELD as EMBEDS
from pagoda.server.processing.prompt_embeds import PromptEmbeds, from_array

# The token sequences that a list of bad words stands for.


def bad_words_token_ids(words: Sequence[str], tokenizer: Tokenizer) -> list[list[int]]:
    """Token ids of each word, as it stands at the start of a text and as it stands after a space.

    Tokenizers spell the two differently. Doubles are dropped, and so is a word that the tokenizer spells with no token.
    """
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        for text in (word, " " + word.lstrip()):
            ids = tuple(tokenizer.encode(text, add_special_tokens=False))
            if ids:
                found[ids] = None
    return [list(ids) for ids in found]


MAX_COPIED: Final = 1 << 24
"""Most tokens of a request's prompt and lists, times n: each answer has a copy of its own in the engine."""

MAX_COPIED_BYTES: Final = 1 << 28
"""Most bytes of the copies of a request's prompt_embeds that the answers after the first have."""

_USUAL = StructuredOutputsConfig()
_PLAIN = SamplingParams()
_PROMPT_KEYS = frozenset({"prompt", "prompt_token_ids", "prompt_embeds", "cache_salt", "type"})
_REFUSED_KEYS = {
    "multi_modal_data": "this version serves text only",
    "multi_modal_uuids": "this version serves text only",
    "mm_processor_kwargs": "this version serves text only",
    "encoder_prompt": "encoder-decoder models are not in this version",
    "decoder_prompt": "encoder-decoder models are not in this version",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt ready to run. `text`: None when the caller gave token ids only.

    `embeds`: in place of tokens; `token_ids` are zeros then, which stand for no token.
    """

    text: str | None
    token_ids: list[int]
    cache_salt: str | None = None
    embeds: PromptEmbeds | None = None

    @property
    def known_ids(self) -> list[int]:
        """The tokens whose text goes before the answer: none for embeddings."""
        return [] if self.embeds is not None else self.token_ids

    def cut(self, kept: slice) -> Prompt:
        """With some of its tokens."""
        embeds = None if self.embeds is None else self.embeds.part(kept)
        return dataclasses.replace(self, token_ids=self.token_ids[kept], embeds=embeds)


PromptType = str | Sequence[int] | Mapping[str, Any] | Prompt
"""Text, token ids, {"prompt": text}, {"prompt_token_ids": ids} or {"prompt_embeds": rows}; mappings may have
"cache_salt". A Prompt is used as it is."""


@dataclasses.dataclass(frozen=True, slots=True)
class PreparedRequest:
    """One request of a caller: its prompt, its params, and one engine request per answer (n)."""

    request_id: str
    prompt: Prompt
    params: SamplingParams
    children: list[EngineRequest]
    arrival_time: float  # Unix seconds
    arrival: float  # monotonic seconds


def open_tokenizer(whole: EngineConfig) -> Tokenizer | None:
    """The model's tokenizer, or the one that was asked for; None with skip_tokenizer_init. Raises ModelError."""
    config, load = whole.model, whole.load
    if config.skip_tokenizer_init:
        return None
    own = config.tokenizer is None or config.tokenizer == config.model
    path = resolve_model(
        config.model if config.tokenizer is None else config.tokenizer,
        load.load_format if own else "dummy",
        weights=False,
        revision=config.tokenizer_revision or (config.revision if own else None),
        token=config.hf_token,
        download_dir=load.download_dir,
        ignore_patterns=load.ignore_patterns,
    )
    return load_tokenizer(_lone_gguf(path) or path)


def _lone_gguf(folder: Path) -> Path | None:
    """The GGUF model of a folder without tokenizer.json: it carries the tokenizer. Raises ModelError for several."""
    names = [] if (folder / "tokenizer.json").exists() else sorted(path.name for path in folder.glob("*.gguf"))
    try:
        return folder / pick_gguf(names) if names else None
    except ModelError as error:
        raise ModelError(f"{folder}: {error}") from None


def is_token_ids(value: object) -> TypeGuard[Sequence[int]]:
    """True for a sequence of integers, which is one prompt, not many."""
    return isinstance(value, Sequence) and not isinstance(value, str) and bool(value) and isinstance(value[0], int)


def check_token_ids(field: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """Raise RequestError naming `field` for ids that are not in the vocabulary."""
    low, high = min(token_ids, default=0), max(token_ids, default=0)
    if low < 0 or high >= vocab_size:
        bad = low if low < 0 else high
        raise RequestError(field, f"token id {bad} is out of range; the vocabulary has {vocab_size} entries")


def kept_tokens(params: SamplingParams, max_model_len: int) -> int | None:
    """How many tokens of a prompt truncate_prompt_tokens keeps; -1 leaves room for one token of answer; None: all.

    Raises RequestError for more than the context has.
    """
    keep = params.truncate_prompt_tokens
    if keep is None:
        return None
    if keep > max_model_len:
        raise RequestError(
            "truncate_prompt_tokens", f"truncate_prompt_tokens {keep} is above the context, {max_model_len}"
        )
    return max(1, max_model_len - 1) if keep == -1 else keep


def encode_kept(
    tokenizer: Tokenizer, text: str, params: SamplingParams, max_model_len: int, add_special_tokens: bool = True
) -> list[int]:
    """Return the token ids of a text, truncated as `params` specify. Raise RequestError."""
    keep = kept_tokens(params, max_model_len)
    if keep is not None:
        text = tokenizer.end_with(text, keep, "right" if params.truncation_side == "right" else "left")
    ids = tokenizer.encode(text, add_special_tokens)
    if keep is None or len(ids) <= keep:
        return ids
    return ids[:keep] if params.truncation_side == "right" else ids[len(ids) - keep :]


class InputProcessor:
    """Turns prompts and params into engine requests for one model."""

    def __init__(
        self,
        config: ModelConfig,
        info: EngineInfo,
        tokenizer: Tokenizer | None,
        structured: StructuredOutputsConfig = _USUAL,
    ) -> None:
        self._info = info
        self._forms = AnswerForms(structured, tokenizer)
        self._tokenizer = tokenizer
        self._longest_answer: int | None = info.sampling_defaults.get("max_tokens")  # the generation config's cap
        self._max_logprobs = info.vocab_size if config.max_logprobs == -1 else min(config.max_logprobs, info.vocab_size)
        self._reads_extra_args = bool(config.logits_processors)
        self._seeds = random.Random(config.seed)  # requests without a seed differ, runs repeat
        main = tokenizer.eos_token_id if tokenizer is not None else None
        if main is None and info.eos_token_ids:
            main = info.eos_token_ids[0]
        self._main_eos = frozenset() if main is None else frozenset({main})
        self._all_eos = self._main_eos | frozenset(info.eos_token_ids)

    @property
    def end_token_ids(self) -> frozenset[int]:
        """Tokens that end an answer, unless a request ignores them."""
        return self._all_eos

    def prepare(
        self, request_id: str, prompt: PromptType, params: SamplingParams, priority: int = 0
    ) -> PreparedRequest:
        """One engine request per answer. Raises RequestError."""
        arrival_time, arrival = time.time(), time.monotonic()
        if not isinstance(prompt, Prompt):  # the server creates Prompts with verified params
            params.verify()
        ready = self._truncate(self.parse(prompt, params), params)
        self._check(ready, params)
        children = self._children(request_id, ready, params, priority, arrival)
        return PreparedRequest(request_id, ready, params, children, arrival_time, arrival)

    def parse(self, prompt: PromptType, params: SamplingParams = _PLAIN) -> Prompt:
        """Tokenise a prompt of any accepted form; of a long text only what truncation by `params` keeps.

        Raises RequestError.
        """
        if isinstance(prompt, str):
            return Prompt(prompt, self._encode(prompt, params))
        if isinstance(prompt, Prompt):
            return prompt
        if not isinstance(prompt, Mapping):
            return Prompt(None, self._token_ids("prompt", prompt, params))
        check_keys(prompt)
        salt, text = prompt.get("cache_salt"), prompt.get("prompt")
        if salt is not None and not (isinstance(salt, str) and salt):
            raise RequestError("cache_salt", "cache_salt must be a string that is not empty")
        if text is not None and not isinstance(text, str):
            raise RequestError("prompt", f"prompt must be a string, not {type(text).__name__}")
        if (embeds := prompt.get("prompt_embeds")) is not None:
            return self._embedded(embeds, prompt, params.truncate_prompt_tokens)
        if (ids := prompt.get("prompt_token_ids")) is not None:
            return Prompt(text, self._token_ids("prompt_token_ids", ids, params), salt)
        if text is None:
            raise RequestError("prompt", "the prompt has neither 'prompt' nor 'prompt_token_ids'")
        return Prompt(text, self._encode(text, params), salt)

    def _token_ids(self, field: str, ids: object, params: SamplingParams) -> list[int]:
        if params.truncate_prompt_tokens is None and isinstance(ids, list):
            self._check_count(len(ids))  # before millions of them are looked at
        return checked_token_ids(field, ids)

    def _embedded(self, values: Any, prompt: Mapping[str, Any], keep: int | None) -> Prompt:
        if prompt.get("prompt_token_ids") is not None:
            raise RequestError(EMBEDS, "a prompt has prompt_embeds or prompt_token_ids, not both")
        embeds = values if isinstance(values, PromptEmbeds) else from_array(values, self._info, keep)
        return Prompt(prompt.get("prompt"), [0] * embeds.count, prompt.get("cache_salt"), embeds)

    def _encode(self, text: str, params: SamplingParams) -> list[int]:
        if self._tokenizer is None:
            raise RequestError("prompt", "the tokenizer is switched off (skip_tokenizer_init); give prompt_token_ids")
        return encode_kept(self._tokenizer, text, params, self._info.max_model_len)

    def _truncate(self, prompt: Prompt, params: SamplingParams) -> Prompt:
        keep, count = kept_tokens(params, self._info.max_model_len), len(prompt.token_ids)
        if keep is None or count <= keep:
            return prompt
        return prompt.cut(slice(0, keep) if params.truncation_side == "right" else slice(count - keep, count))

    def _check_count(self, count: int) -> None:
        limit = self._info.max_model_len
        if count >= limit:  # clients know by these words that a conversation has to be cut
            raise RequestError(
                "prompt",
                f"This model's maximum context length is {limit} tokens, but the prompt is too long: {count} tokens, "
                f"and the answer needs at least 1; shorten it to {limit - 1} or set truncate_prompt_tokens",
            )

    def _check(self, prompt: Prompt, params: SamplingParams) -> None:
        count, limit, vocab = len(prompt.token_ids), self._info.max_model_len, self._info.vocab_size
        if not count:
            raise RequestError("prompt", "the prompt is empty: it has no tokens")
        self._check_count(count)
        check_token_ids("prompt", prompt.token_ids, vocab)
        if params.max_tokens is None and params.min_tokens > limit - count:
            raise RequestError("min_tokens", f"min_tokens {params.min_tokens} does not fit the {limit - count} left")
        if self._longest_answer is not None and params.min_tokens > self._longest_answer:
            raise RequestError(
                "min_tokens",
                f"min_tokens {params.min_tokens} is above what the generation config allows, {self._longest_answer}",
            )
        for name, asked in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
            if asked is not None and (vocab if asked == -1 else asked) > self._max_logprobs:
                which = "-1 (the whole vocabulary)" if asked == -1 else asked
                raise RequestError(
                    name, f"{name} {which} is above the server's limit of {self._max_logprobs} (--max-logprobs)"
                )
        if prompt.embeds is not None and params.prompt_logprobs is not None:
            raise RequestError(
                "prompt_logprobs", "prompt_logprobs are of tokens, and prompt_embeds have none; drop one"
            )
        if params.extra_args and not self._reads_extra_args:
            raise RequestError("extra_args", "nothing here reads extra_args: there are no --logits-processors")
        if params.stop_strings and self._tokenizer is None:
            raise RequestError("stop", "stop strings need a tokenizer, which is switched off (skip_tokenizer_init)")

    def _children(
        self, request_id: str, prompt: Prompt, params: SamplingParams, priority: int, arrival: float
    ) -> list[EngineRequest]:
        room = self._info.max_model_len - len(prompt.token_ids)
        room = room if self._longest_answer is None else min(room, self._longest_answer)
        eos = frozenset() if params.ignore_eos else self._all_eos
        words = self._bad_words(params)
        grammar = self._forms.grammar(params)
        thinking = self._forms.thinking(params, prompt.text, prompt.known_ids)
        rules = params.rules(
            vocab_size=self._info.vocab_size,
            eos_token_ids=eos,
            bad_words_token_ids=words,
            default_seed=self._seeds.getrandbits(63),
            verify=False,
        )
        ends = eos | frozenset(params.stop_token_ids or ())
        _check_copies(params.n, prompt, len(ends), rules)
        embeds = prompt.embeds
        ids = [request_id] if params.n == 1 else [f"{index}_{request_id}" for index in range(params.n)]
        return [
            EngineRequest(
                request_id=child_id,
                prompt_token_ids=prompt.token_ids if embeds is None else [EMBEDDED] * embeds.count,
                rules=params.rules_of(index, rules),
                max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
                stop_token_ids=ends,
                eos_token_ids=frozenset() if params.ignore_eos else self._main_eos,
                priority=priority,
                arrival=arrival,
                cache_salt=prompt.cache_salt,
                skip_reading_prefix_cache=bool(params.skip_reading_prefix_cache),
                grammar=grammar,
                thinking=thinking,
                prompt_embeds=None if embeds is None else embeds.rows,
            )
            for index, child_id in enumerate(ids)
        ]

    def _bad_words(self, params: SamplingParams) -> Sequence[Sequence[int]]:
        if not params.bad_words:
            return ()
        if self._tokenizer is None:
            raise RequestError("bad_words", "bad_words need a tokenizer, which is switched off (skip_tokenizer_init)")
        return bad_words_token_ids(params.bad_words, self._tokenizer)


def _check_copies(n: int, prompt: Prompt, ends: int, rules: SamplingRules) -> None:
    tokens, size = len(prompt.token_ids) + ends, 0 if prompt.embeds is None else len(prompt.embeds.rows)
    if (n - 1) * size > MAX_COPIED_BYTES:
        raise RequestError(
            "n", f"n {n} answers with {size} bytes of prompt_embeds each are above {MAX_COPIED_BYTES}; lower n"
        )
    lists = len(rules.allowed_token_ids or ()) + len(rules.logit_bias) + sum(map(len, rules.bad_words))
    if n * (tokens + lists) > MAX_COPIED:
        raise RequestError(
            "n",
            f"n {n} answers with {tokens + lists} tokens of prompt and lists each are above {MAX_COPIED}; lower n",
        )


def check_keys(prompt: Mapping[str, Any]) -> None:
    """Raises RequestError for what no prompt may hold."""
    for key, value in prompt.items():
        if key in _REFUSED_KEYS and value is not None:
            raise RequestError(key, f"{key} is not supported: {_REFUSED_KEYS[key]}")
        if key not in _PROMPT_KEYS and key not in _REFUSED_KEYS:
            raise RequestError(
                str(key), f"a prompt has no key {key!r}; use 'prompt', 'prompt_token_ids' or 'prompt_embeds'"
            )


def checked_token_ids(field: str, value: object) -> list[int]:
    """A list of integers. Raises RequestError naming the field."""
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise RequestError(field, f"{field} must be text or a list of token ids, not {type(value).__name__}")
    ids = list(value)
    for token in ids:
        if type(token) is not int:
            raise RequestError(field, f"{field} must hold integers only, not {type(token).__name__}")
    return ids
