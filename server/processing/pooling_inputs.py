"""From what a caller passes to a pooling model to the engine's requests: tokenised, truncated, checked.

Every refusal is a RequestError that names the field. Knows what the model offers, not its device.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final, Literal, get_args

from pagoda.common.engine.messages import EngineRequest, pooling_request
from pagoda.common.engine.pooling import PoolingRules, PoolingTask
from pagoda.common.errors import RequestError
from pagoda.common.pooling_params import PoolingParams
from pagoda.common.sampling_params import SamplingParams
from pagoda.common.text.chat_template import render_chat
from pagoda.common.text.tokenizer import Tokenizer
from pagoda.server.ipc_messages import EngineInfo, PoolingInfo
from pagoda.server.processing.inputs import PromptType, check_keys, check_token_ids, checked_token_ids

# Text and pairs of texts as the tokens of a pooling model, cut so that its special tokens stay where they belong.
#
# Knows tokenizers. Does not know requests.

Side = Literal["left", "right"]
SIDES: Final[tuple[str, ...]] = get_args(Side)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextOptions:
    """How text becomes tokens. `truncate_prompt_tokens`: keep so many, -1 what the model takes, None cuts nothing.

    `truncation_side`: where the rest is cut off; None is right.
    """

    add_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    truncation_side: Side | None = None

    @classmethod
    def of(cls, values: Mapping[str, Any] | None) -> TextOptions:
        """Options by their names, as `tokenization_kwargs` has them. Raises RequestError naming one."""
        known = {field.name for field in fields(cls)}
        for name in values or ():
            if name not in known:
                raise RequestError(
                    "tokenization_kwargs", f"there is no {str(name)[:40]!r}; use {', '.join(sorted(known))}"
                )
        found = cls(**(values or {}))
        keep = found.truncate_prompt_tokens
        if keep is not None and (type(keep) is not int or keep < -1):
            raise RequestError("truncate_prompt_tokens", "truncate_prompt_tokens must be an integer of -1 or more")
        if found.truncation_side is not None and found.truncation_side not in SIDES:
            raise RequestError("truncation_side", f"truncation_side must be one of {', '.join(SIDES)}")
        return found


def encode(tokenizer: Tokenizer, text: str, *, special: bool, keep: int | None, side: Side | None) -> list[int]:
    """Token ids of a text, at most `keep` of them: the text is cut, not the special tokens around it."""
    if keep is not None:
        text = tokenizer.pre_truncate(text, keep, side or "right")
    whole = tokenizer.encode(text, special)
    if keep is None or len(whole) <= keep:
        return whole
    inner = tokenizer.encode(text, False) if special else whole
    start = _find(inner, whole, 0)
    room = _room(keep, len(whole) - len(inner))
    return whole[:start] + cut(inner, room, side) + whole[start + len(inner) :]


def encode_pair(
    tokenizer: Tokenizer, first: str, second: str, *, keep: int | None, side: Side | None
) -> tuple[list[int], int | None]:
    """Token ids of a pair, at most `keep` of them, and where tokens of type 1 begin. The longer text is cut first."""
    if keep is not None:
        first, second = (tokenizer.pre_truncate(text, keep, side or "right") for text in (first, second))
    whole, type_one = tokenizer.encode_pair(first, second)
    if keep is None or len(whole) <= keep:
        return whole, type_one
    one, two = tokenizer.encode(first, False), tokenizer.encode(second, False)
    start = _find(one, whole, 0)
    middle = _find(two, whole, start + len(one))
    room = _room(keep, len(whole) - len(one) - len(two))
    left_one, left_two = _shares(len(one), len(two), room)
    before, between, after = whole[:start], whole[start + len(one) : middle], whole[middle + len(two) :]
    ids = [*before, *cut(one, left_one, side), *between, *cut(two, left_two, side), *after]
    return ids, None if type_one is None else type_one - (len(one) - left_one)


def shortened(tokenizer: Tokenizer, text: str, most: int) -> str:
    """The beginning of a text that is its first `most` tokens; 0: all of it."""
    if not most:
        return text
    offsets = tokenizer.offsets(tokenizer.pre_truncate(text, most, "right"), False)
    return text if len(offsets) <= most else text[: offsets[most - 1][1]]


def cut(ids: Sequence[int], most: int, side: Side | None) -> list[int]:
    """`most` of the ids: the first of them, or the last when the left side is cut off."""
    return list(ids[len(ids) - most :] if side == "left" else ids[:most]) if most < len(ids) else list(ids)


def _shares(one: int, two: int, room: int) -> tuple[int, int]:
    """How much of two lengths is kept, taking from the longer until they fit."""
    if one > two:
        return _shares(two, one, room)[::-1]
    shorter = min(one, room // 2)
    return shorter, room - shorter


def _room(keep: int, special: int) -> int:
    if keep <= special:
        raise RequestError(
            "truncate_prompt_tokens",
            f"truncate_prompt_tokens {keep} leaves no room for text beside {special} special tokens",
        )
    return keep - special


def _find(part: Sequence[int], whole: Sequence[int], start: int) -> int:
    """Where a text's own tokens are among all."""
    for at in range(start, len(whole) - len(part) + 1):
        if list(whole[at : at + len(part)]) == list(part):
            return at
    raise RequestError("truncate_prompt_tokens", "this model's tokenizer lets no text be cut; shorten it instead")


NO_POOLING: Final = "this model generates text; to have vectors, labels or scores of it, start it with --runner pooling"
NO_GENERATION: Final = "this model was started for pooling and generates no text; start it with --runner generate"
PLAIN: Final = TextOptions()
"""The usual treatment of a text: special tokens as the tokenizer has them, nothing cut off."""


@dataclass(frozen=True, slots=True)
class PooledPrompt:
    """A prompt ready to be pooled. `second_text`: where tokens of type 1 begin; None: there are none."""

    token_ids: list[int]
    second_text: int | None = None


@dataclass(frozen=True, slots=True)
class PreparedPooling:
    """One request of a caller and the engine's request for it."""

    request_id: str
    prompt: PooledPrompt
    params: PoolingParams
    child: EngineRequest

    @property
    def children(self) -> list[EngineRequest]:
        """The engine's request, in a list as those of generation are."""
        return [self.child]


@dataclass(frozen=True, slots=True, kw_only=True)
class PairTemplate:
    """A jinja template for pairs, which come as messages of roles `query` and `document`. `keywords`: more for it."""

    source: str
    keywords: Mapping[str, Any]


class PoolingInputs:
    """Turns prompts and params into engine requests for one pooling model."""

    def __init__(self, info: EngineInfo, tokenizer: Tokenizer | None) -> None:
        if info.pooling is None:
            raise RequestError("model", NO_POOLING)
        self.pooling: PoolingInfo = info.pooling
        self._info = info
        self._tokenizer = tokenizer

    def prepare(
        self,
        request_id: str,
        prompt: PromptType | PooledPrompt,
        params: PoolingParams | SamplingParams,
        priority: int = 0,
    ) -> PreparedPooling:
        """The engine's request. Raises RequestError."""
        if isinstance(params, SamplingParams):
            raise RequestError("model", NO_GENERATION)
        ready = prompt if isinstance(prompt, PooledPrompt) else self.parse(prompt)
        self._check(ready)
        rules = self._rules(params, ready)
        arrival = time.monotonic()
        child = pooling_request(request_id, ready.token_ids, rules, priority=priority, arrival=arrival)
        return PreparedPooling(request_id, ready, params, child)

    def parse(self, prompt: PromptType, options: TextOptions = PLAIN) -> PooledPrompt:
        """Tokenise and truncate a prompt of any accepted form. Raises RequestError."""
        keep = self._keep(options)
        if isinstance(prompt, str):
            return PooledPrompt(self._encode(prompt, options, keep))
        if not isinstance(prompt, Mapping):
            return PooledPrompt(_cut(checked_token_ids("prompt", prompt), keep, options.truncation_side))
        check_keys(prompt)
        if prompt.get("prompt_embeds") is not None:
            raise RequestError("prompt_embeds", "prompt_embeds are for models that generate; give text or token ids")
        salt = prompt.get("cache_salt")
        if salt is not None and not (isinstance(salt, str) and salt):
            raise RequestError("cache_salt", "cache_salt must be a string that is not empty")
        if (ids := prompt.get("prompt_token_ids")) is not None:
            return PooledPrompt(_cut(checked_token_ids("prompt_token_ids", ids), keep, options.truncation_side))
        text = prompt.get("prompt")
        if not isinstance(text, str):
            raise RequestError("prompt", "prompt must be a string, or leave it to prompt_token_ids")
        return PooledPrompt(self._encode(text, options, keep))

    def pair(
        self, first: str, second: str, options: TextOptions = PLAIN, template: PairTemplate | None = None
    ) -> PooledPrompt:
        """Two texts in one prompt, as a cross-encoder reads them. Raises RequestError."""
        keep, tokenizer = self._keep(options), self.tokenizer
        if template is not None:
            messages = [{"role": "query", "content": first}, {"role": "document", "content": second}]
            text = render_chat(
                tokenizer, messages, template=template.source, add_generation_prompt=False, **template.keywords
            )
            return PooledPrompt(self._encode(text, options, keep))
        if self.pooling.pairs == "concatenated":
            return PooledPrompt(self._encode(first + second, options, keep))
        return PooledPrompt(*encode_pair(tokenizer, first, second, keep=keep, side=options.truncation_side))

    def task(self, asked: str | None) -> PoolingTask:
        """The task asked for, or the model's usual one. Raises RequestError for one that it does not offer."""
        offered = self.pooling.tasks
        if asked is None:
            return offered[0]
        for task in offered:
            if task == asked:
                return task
        hint = {"embed": " (--convert embed)", "classify": " (--convert classify)"}.get(asked, "")
        raise RequestError("task", f"this model does not offer {asked!r}{hint}; it offers {', '.join(offered)}")

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises RequestError when it is switched off."""
        if self._tokenizer is None:
            raise RequestError("prompt", "the tokenizer is switched off (skip_tokenizer_init); give token ids")
        return self._tokenizer

    def _encode(self, text: str, options: TextOptions, keep: int | None) -> list[int]:
        return encode(self.tokenizer, text, special=options.add_special_tokens, keep=keep, side=options.truncation_side)

    def _keep(self, options: TextOptions) -> int | None:
        keep, limit = options.truncate_prompt_tokens, self._info.max_model_len
        if keep is None:
            return None
        if keep > limit:
            raise RequestError(
                "truncate_prompt_tokens", f"truncate_prompt_tokens {keep} is above what the model takes, {limit}"
            )
        return limit if keep == -1 else keep

    def _check(self, prompt: PooledPrompt) -> None:
        ids, limit, vocab = prompt.token_ids, self._info.max_model_len, self._info.vocab_size
        if not ids:
            raise RequestError("prompt", "the prompt is empty: it has no tokens")
        if len(ids) > limit:
            raise RequestError(
                "prompt",
                f"This model's maximum context length is {limit} tokens, but the prompt is too long: {len(ids)}; "
                "shorten it or set truncate_prompt_tokens to -1",
            )
        check_token_ids("prompt", ids, vocab)

    def _rules(self, params: PoolingParams, prompt: PooledPrompt) -> PoolingRules:
        params.verify()
        task = self.task(params.task)
        wanted = self.pooling.use_activation if params.use_activation is None else params.use_activation
        return PoolingRules(
            task=task,
            use_activation=wanted,
            dimensions=self._dimensions(params.dimensions, task),
            second_text=prompt.second_text,
        )

    def _dimensions(self, asked: int | None, task: PoolingTask) -> int | None:
        """How many numbers of an embedding are kept. Raises RequestError."""
        model = self.pooling
        embeds = task in ("embed", "token_embed")
        if asked is None:
            return model.default_dimensions if embeds else None
        if not embeds:
            raise RequestError("dimensions", f"dimensions are those of embeddings; task {task!r} has none")
        if not model.is_matryoshka:
            raise RequestError(
                "dimensions",
                f"this model's embeddings cannot be shortened (no Matryoshka); leave dimensions out to have all "
                f"{model.embedding_size}",
            )
        if model.dimensions and asked not in model.dimensions:
            raise RequestError(
                "dimensions", f"dimensions {asked} is none of {', '.join(str(each) for each in model.dimensions)}"
            )
        if asked > model.embedding_size:
            raise RequestError("dimensions", f"dimensions {asked} is above the model's {model.embedding_size}")
        return asked


def _cut(ids: list[int], keep: int | None, side: Side | None) -> list[int]:
    return ids if keep is None else cut(ids, keep, side)
