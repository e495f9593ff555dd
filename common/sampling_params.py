"""SamplingParams: the options of one generation, with vLLM's field names, order and defaults.

`verify` refuses every value outside its bounds, naming the field; `rules` resolves the options into the frozen
SamplingRules, token ids only, that the engine samples by.
"""

from __future__ import annotations

import copy
import secrets
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from enum import Enum, IntEnum
from typing import Any, ClassVar, Final

import msgspec

from pagoda.common.engine.sampling.rules import GREEDY_EPSILON, SamplingRules
from pagoda.common.errors import RequestError
from pagoda.common.request_bounds import sampling_bound


@dataclass(frozen=True, slots=True)
class RepetitionDetectionParams:
    """End an answer whose last tokens repeat one pattern `min_count` times."""

    max_pattern_size: int = 0  # Number of tokens; 0 disables the detection.
    min_pattern_size: int = 0  # Number of tokens; 0 means 1.
    min_count: int = 0

    def verify(self) -> None:
        """Raise RequestError for inconsistent sizes."""
        for name in ("max_pattern_size", "min_pattern_size", "min_count"):
            value = getattr(self, name)
            maximum = int(sampling_bound(name).numbers[1])
            if type(value) is not int or not 0 <= value <= maximum:
                raise RequestError(
                    "repetition_detection", f"repetition_detection.{name} must be an integer between 0 and {maximum}"
                )
        if self.min_pattern_size > self.max_pattern_size:
            raise RequestError(
                "repetition_detection", "repetition_detection.min_pattern_size is above its max_pattern_size"
            )
        if self.max_pattern_size and self.min_count < 2:
            raise RequestError(
                "repetition_detection", "repetition_detection.min_count must be at least 2: once is no repetition"
            )

    def ends(self, token_ids: Sequence[int]) -> bool:
        """Return whether the newest token completes a repetition."""
        for size in range(max(1, self.min_pattern_size), self.max_pattern_size + 1):
            span = size * self.min_count
            if span > len(token_ids):
                return False
            if token_ids[-1] != token_ids[-1 - size]:
                continue
            if token_ids[-span:-size] == token_ids[len(token_ids) - span + size :]:
                return True
        return False


KINDS: Final = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
"""Constraints, of which exactly one is set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    """The constraint on an answer's format."""

    json: str | Mapping[str, Any] | bool | None = None  # JSON schema, as text or object.
    regex: str | None = None
    choice: tuple[str, ...] | list[str] | None = None
    grammar: str | None = None  # Lark or EBNF (GBNF)
    json_object: bool | None = None
    structural_tag: str | Mapping[str, Any] | None = None  # Tags that enable schemas, as JSON text or object.
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None  # Regular expression of the white space between JSON tokens.

    def __post_init__(self) -> None:
        if isinstance(self.choice, list):
            object.__setattr__(self, "choice", tuple(self.choice))
        set_kinds = [
            name for name in KINDS if getattr(self, name) is not None and (name == "json" or getattr(self, name))
        ]
        if len(set_kinds) != 1:
            kinds = ", ".join(set_kinds) or "none"
            raise RequestError(
                "structured_outputs",
                f"structured_outputs must set exactly one of {', '.join(KINDS)}; set here: {kinds}",
            )


NOT_YET: Final = (
    "watermarking",
    "prompt_logprob_token_ids",
    "prompt_logprob_start",
    "flat_logprobs",
    "output_text_buffer_length",
    "routed_experts_prompt_start",
    "trace_decode_token_ids",
)
"""Fields of vLLM's interface that this version refuses unless they have their default."""


MODEL_DEFAULTS: Final = ("repetition_penalty", "temperature", "top_k", "top_p", "min_p")
"""Fields whose default a model may set in generation_config.json."""


class RequestOutputKind(Enum):
    """Content of each streamed output: everything so far, what is new, or one output at the end."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


class SamplingType(IntEnum):
    """How a token is chosen."""

    GREEDY = 0
    RANDOM = 1
    RANDOM_SEED = 2


@dataclass
class SamplingParams:
    """How to continue a prompt. Units: tokens for counts, natural log for biases and penalties."""

    n: int = 1  # number of outputs per prompt
    presence_penalty: float = 0.0  # subtracted from the logit of each token that the output contains
    frequency_penalty: float = 0.0  # subtracted from a token's logit for each time that the output contains it
    repetition_penalty: float = 1.0  # makes tokens of prompt and output less likely above 1, more likely below 1
    temperature: float = 1.0  # divides the logits; 0: always the most likely token
    watermarking: bool | None = None  # refused: not in this version
    top_p: float = 1.0  # sample from the fewest tokens whose probabilities add up to this; 1: from all
    top_k: int = 0  # sample from this many of the most likely tokens; 0 or -1: from all
    min_p: float = 0.0  # sample from tokens at least this likely, relative to the most likely one; 0: from all
    seed: int | None = None  # None or -1: the server chooses; with n > 1, output i samples with seed + i
    stop: str | list[str] | None = None  # texts that end the output; they are not part of it
    stop_token_ids: list[int] | None = None  # tokens that end the output
    ignore_eos: bool = False  # continue after an end-of-sequence token
    max_tokens: int | None = 16  # maximum length of an output; None: up to the model's context
    min_tokens: int = 0
    """Length before which no end-of-sequence or stop token is generated and no stop text ends the output."""
    logprobs: int | None = None  # number of best tokens to report for each token of the output; -1: all
    prompt_logprobs: int | None = None  # number of best tokens to report for each token of the prompt; -1: all
    prompt_logprob_token_ids: Any = None  # refused: not in this version
    prompt_logprob_start: int | None = None  # refused: not in this version
    logprob_token_ids: list[int] | None = None  # report these tokens instead of the best
    flat_logprobs: bool = False  # refused: not in this version
    detokenize: bool = True  # False: outputs have token ids only, no text
    skip_special_tokens: bool = True  # leave special tokens out of the text
    spaces_between_special_tokens: bool = True  # False: no space before a special token, where the tokenizer adds one
    include_stop_str_in_output: bool = False  # the text that ended the output is part of it
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE  # what each output of a stream contains
    stream_interval: int | None = None  # tokens between two outputs; None: --stream-interval
    skip_clone: bool = False
    """The caller will not change the object, so that `clone` may share its lists. The engine needs no clone."""
    output_text_buffer_length: int = 0  # refused: not in this version
    structured_outputs: StructuredOutputsParams | None = None  # the constraint that the output conforms to
    logit_bias: dict[int, float] | None = None  # token id -> number that is added to its logit
    allowed_token_ids: list[int] | None = None  # generate only these tokens
    extra_args: dict[str, Any] | None = None  # arguments of logits processors
    bad_words: list[str] | None = None  # texts that are not generated
    skip_reading_prefix_cache: bool | None = None  # compute the whole prompt, even if prefixes are cached
    thinking_token_budget: int | None = None  # maximum number of reasoning tokens; -1: no limit
    repetition_detection: RepetitionDetectionParams | None = None  # ends an output that repeats itself
    routed_experts_prompt_start: int = 0  # refused: not in this version
    trace_decode_token_ids: list[int] | None = None  # refused: not in this version
    truncate_prompt_tokens: int | None = field(default=None, kw_only=True)
    """Keep this many tokens of a longer prompt; -1: as many as the context holds."""
    truncation_side: str | None = field(default=None, kw_only=True)
    """Which end of a longer prompt is cut off: "left", its beginning, or "right"; None: its beginning."""

    __struct_fields__: ClassVar[tuple[str, ...]]
    """Names of all fields, under the name that vLLM's class has them."""

    def __post_init__(self) -> None:
        if self.stop is None:
            self.stop = []
        elif isinstance(self.stop, str):
            self.stop = [self.stop]
        if self.stop_token_ids is None:
            self.stop_token_ids = []
        if self.bad_words is None:
            self.bad_words = []
        if self.seed == -1:
            self.seed = None
        self.verify()

    @classmethod
    def from_optional(
        cls,
        n: int | None = 1,
        presence_penalty: float | None = 0.0,
        frequency_penalty: float | None = 0.0,
        repetition_penalty: float | None = 1.0,
        temperature: float | None = 1.0,
        watermarking: Any = None,
        top_p: float | None = 1.0,
        top_k: int | None = 0,
        min_p: float | None = 0.0,
        seed: int | None = None,
        stop: str | list[str] | None = None,
        stop_token_ids: list[int] | None = None,
        bad_words: list[str] | None = None,
        thinking_token_budget: int | None = None,
        include_stop_str_in_output: bool | None = False,
        ignore_eos: bool | None = False,
        max_tokens: int | None = 16,
        min_tokens: int | None = 0,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        prompt_logprob_token_ids: Any = None,
        prompt_logprob_start: int | None = None,
        detokenize: bool | None = True,
        skip_special_tokens: bool | None = True,
        spaces_between_special_tokens: bool | None = True,
        output_kind: RequestOutputKind | None = RequestOutputKind.CUMULATIVE,
        stream_interval: int | None = None,
        structured_outputs: StructuredOutputsParams | None = None,
        logit_bias: Mapping[int, float] | Mapping[str, float] | None = None,
        allowed_token_ids: list[int] | None = None,
        extra_args: dict[str, Any] | None = None,
        skip_clone: bool | None = False,
        repetition_detection: RepetitionDetectionParams | None = None,
        logprob_token_ids: list[int] | None = None,
        routed_experts_prompt_start: int | None = 0,
        trace_decode_token_ids: list[int] | None = None,
        **others: Any,
    ) -> SamplingParams:
        """Return params from values of which None means "the default" (except for `max_tokens`).

        `logit_bias` may have its ids as strings, as in JSON. `others`: fields that vLLM's method lacks.
        """
        values = {**{name: value for name, value in locals().items() if name not in ("cls", "others")}, **others}
        set_values = {name: value for name, value in values.items() if value is not None or name == "max_tokens"}
        if isinstance(bias := set_values.get("logit_bias"), dict):
            set_values["logit_bias"] = {_id_of(key): value for key, value in bias.items()}
        return cls(**set_values)

    def clone(self) -> SamplingParams:
        """Return a deep copy; with `skip_clone`, a shallow one."""
        return copy.copy(self) if self.skip_clone else copy.deepcopy(self)

    @property
    def stop_strings(self) -> list[str]:
        """`stop` as a list."""
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())

    @property
    def yields_deltas(self) -> bool:
        """True when an output has only what is new."""
        return self.output_kind is RequestOutputKind.DELTA

    @property
    def reports_logprobs(self) -> bool:
        """True when each token comes with log-probabilities."""
        return self.logprobs is not None or bool(self.logprob_token_ids)

    @property
    def is_greedy(self) -> bool:
        """True when the best token wins without noise."""
        return self.temperature < GREEDY_EPSILON

    @property
    def sampling_type(self) -> SamplingType:
        """Whether noise decides, and whether it is reproducible."""
        if self.is_greedy:
            return SamplingType.GREEDY
        return SamplingType.RANDOM if self.seed is None else SamplingType.RANDOM_SEED

    @property
    def num_logprobs(self) -> int | None:
        """Number of log-probabilities reported per token, -1: the vocabulary; None: no report."""
        if self.logprobs is not None:
            return self.logprobs
        return len(self.logprob_token_ids) if self.logprob_token_ids else None

    @property
    def all_stop_token_ids(self) -> set[int]:
        """`stop_token_ids` as a set. The model's own end tokens are known to the engine only."""
        return set(self.stop_token_ids or ())

    def verify(self) -> None:
        """Raise RequestError naming the first field with an invalid value. Call it again after changing fields."""
        for name in NOT_YET:
            if not _is_default(getattr(self, name), _DEFAULTS[name]):
                raise RequestError(name, f"{name} is not supported by this version of pagoda; leave it unset")
        for name, check in _CHECKS.items():
            value = getattr(self, name)
            if value is not _DEFAULTS[name]:  # Most values are the defaults.
                check(name, value)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError("min_tokens", f"min_tokens {self.min_tokens} is above max_tokens {self.max_tokens}")
        if self.stop_strings and not self.detokenize:
            raise RequestError("stop", "stop strings need detokenize=True; use stop_token_ids, or leave detokenize on")

    def rules(
        self,
        *,
        vocab_size: int,
        eos_token_ids: Collection[int] = (),
        bad_words_token_ids: Sequence[Sequence[int]] = (),
        default_seed: int | None = None,
        index: int = 0,
        verify: bool = True,
    ) -> SamplingRules:
        """Return the engine's rules for answer `index` of n. Raises RequestError for ids outside the vocabulary.

        `bad_words_token_ids`: `bad_words`, tokenised (server/processing/inputs.py). `default_seed`: for a request
        without one; None draws 63 random bits. `verify`: False if the fields have not changed since they were verified.
        """
        if verify:
            self.verify()
        if self.logit_bias:
            _need_in_vocabulary("logit_bias", self.logit_bias, vocab_size)
        if self.allowed_token_ids:
            _need_in_vocabulary("allowed_token_ids", self.allowed_token_ids, vocab_size)
        if self.stop_token_ids:
            _need_in_vocabulary("stop_token_ids", self.stop_token_ids, vocab_size)
        if self.logprob_token_ids:
            _need_in_vocabulary("logprob_token_ids", self.logprob_token_ids, vocab_size)
        for word in bad_words_token_ids:
            _need_in_vocabulary("bad_words", word, vocab_size, is_value=False)
        greedy = self.is_greedy
        ends = set(self.stop_token_ids or ()) | (set() if self.ignore_eos else set(eos_token_ids))
        return SamplingRules(
            temperature=0.0 if greedy else float(self.temperature),
            top_p=1.0 if greedy else float(self.top_p),
            top_k=0 if greedy or not 0 < self.top_k < vocab_size else self.top_k,
            min_p=0.0 if greedy else float(self.min_p),
            presence_penalty=float(self.presence_penalty),
            frequency_penalty=float(self.frequency_penalty),
            repetition_penalty=float(self.repetition_penalty),
            logit_bias=tuple(sorted((token, float(bias)) for token, bias in (self.logit_bias or {}).items())),
            allowed_token_ids=None if self.allowed_token_ids is None else tuple(sorted(set(self.allowed_token_ids))),
            bad_words=tuple(tuple(word) for word in bad_words_token_ids),
            min_tokens=self.min_tokens,
            stop_ids=tuple(sorted(ends)) if self.min_tokens else (),
            seed=0 if greedy else self._seed(default_seed, index),
            logprobs=-1 if self.logprob_token_ids else self.logprobs,
            logprob_token_ids=tuple(dict.fromkeys(self.logprob_token_ids or ())),
            prompt_logprobs=self.prompt_logprobs,
            extra_args=self.extra_args,
        )

    def rules_of(self, index: int, first: SamplingRules) -> SamplingRules:
        """Return the rules of answer `index` of n, given those of the first."""
        return first if self.is_greedy else replace(first, seed=_wrapped(first.seed + index))

    def _seed(self, default_seed: int | None, index: int) -> int:
        """Return the int64 seed of answer `index`; sums wrap around."""
        seed = self.seed if self.seed is not None else default_seed
        if seed is None:
            return secrets.randbits(63)
        return _wrapped(seed + index)


def params_of(rules: SamplingRules) -> SamplingParams:
    """Return params for logits processors that vLLM's interface gives them; words and stop strings are missing."""
    return SamplingParams(
        temperature=rules.temperature,
        top_p=rules.top_p,
        top_k=rules.top_k,
        min_p=rules.min_p,
        presence_penalty=rules.presence_penalty,
        frequency_penalty=rules.frequency_penalty,
        repetition_penalty=rules.repetition_penalty,
        logit_bias=dict(rules.logit_bias) or None,
        allowed_token_ids=None if rules.allowed_token_ids is None else list(rules.allowed_token_ids),
        max_tokens=None,
        min_tokens=rules.min_tokens,
        stop_token_ids=list(rules.stop_ids),
        seed=rules.seed,
        logprobs=rules.logprobs,
        prompt_logprobs=rules.prompt_logprobs,
        logprob_token_ids=list(rules.logprob_token_ids) or None,
        extra_args=None if rules.extra_args is None else dict(rules.extra_args),
    )


def _wrapped(seed: int) -> int:
    return (seed + 2**63) % 2**64 - 2**63


Check = Callable[[str, Any], None]


def _optional(check: Check) -> Check:
    """Return a check that accepts None."""
    return lambda name, value: None if value is None else check(name, value)


def _int(name: str) -> Check:
    low, high = map(int, sampling_bound(name).numbers)

    def check(name: str, value: object) -> None:
        if not isinstance(value, int) or isinstance(value, bool):
            raise RequestError(name, f"{name} must be an integer, not {_shown(value)}")
        if not low <= value <= high:
            raise RequestError(name, f"{name} must be between {low} and {high}, not {_shown(value)}")

    return check


def _number(name: str) -> Check:
    bound = sampling_bound(name)
    low, high = bound.numbers
    above = bound.above

    def check(name: str, value: object) -> None:
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise RequestError(name, f"{name} must be a number, not {_shown(value)}")
        if not low <= value <= high or (above and value == low):  # NaN fails the first comparison.
            bounds = f"above {low} and at most {high}" if above else f"between {low} and {high}"
            raise RequestError(name, f"{name} must be {bounds}, not {_shown(value)}")

    return check


def _flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise RequestError(name, f"{name} must be true or false, not {_shown(value)}")


def _instance(kind: type[Any], text: str) -> Check:
    def check(name: str, value: object) -> None:
        if not isinstance(value, kind):
            raise RequestError(name, f"{name} must be {text}, not {_shown(value)}")

    return check


def _entries(name: str, value: object, kind: str, maximum: int) -> Sequence[Any]:
    """Return the entries of a list of bounded length."""
    if not isinstance(value, list | tuple):
        raise RequestError(name, f"{name} must be a list of {kind}, not {_shown(value)}")
    if len(value) > maximum:
        raise RequestError(name, f"{name} has {len(value)} entries; at most {maximum} are allowed")
    return value


def _words(name: str) -> Check:
    bound = sampling_bound(name)
    maximum = bound.most_entries
    characters = bound.most_characters

    def check(name: str, value: object) -> None:
        words = _entries(name, [value] if isinstance(value, str) else value, "strings", maximum)
        for word in words:
            if isinstance(word, str) and 0 < len(word) <= characters:
                continue
            path = name if isinstance(value, str) else f"{name}[{words.index(word)}]"
            reason = f"must have 1 to {characters} characters" if isinstance(word, str) else "must be a string"
            raise RequestError(path, f"{path} {reason}, not {_shown(word)}")

    return check


def _ids(name: str, *, may_be_empty: bool) -> Check:
    maximum = sampling_bound(name).most_entries

    def check(name: str, value: object) -> None:
        tokens = _entries(name, value, "token ids", maximum)
        if not tokens and not may_be_empty:
            raise RequestError(name, f"{name} is empty: no token could be chosen; leave it unset to allow all")
        for token in tokens:
            if type(token) is not int or token < 0:
                _need_id(f"{name}[{tokens.index(token)}]", token)

    return check


def _bias(name: str, value: object) -> None:
    if not isinstance(value, dict):
        raise RequestError(name, f"{name} must map token ids to numbers, not {_shown(value)}")
    maximum = sampling_bound("logit_bias").most_entries
    if len(value) > maximum:
        raise RequestError(name, f"{name} has {len(value)} entries; at most {maximum} are allowed")
    wrong = [token for token in value if not isinstance(token, int)]
    if wrong:
        shown = ", ".join(map(_shown, wrong[:8]))
        raise RequestError(name, f"{name} must contain integer token ids, not {shown}")
    in_range = _number("logit_bias")
    for token, bias in value.items():
        _need_id(f"{name}.{token}", token)
        in_range(f"{name}.{token}", bias)


def _side(name: str, value: object) -> None:
    if value not in (None, "left", "right"):
        raise RequestError(name, f"{name} must be left or right, not {_shown(value)}")


def _repetition(name: str, value: object) -> None:
    if not isinstance(value, RepetitionDetectionParams):
        raise RequestError(name, f"{name} must be RepetitionDetectionParams, not {_shown(value)}")
    value.verify()


def _json_object(name: str, value: object) -> None:
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise RequestError(name, f"{name} must map names to values, not {_shown(value)}")
    try:
        msgspec.json.encode(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(name, f"{name} must contain JSON values only: {error}") from None


def _need_id(name: str, token: object) -> None:
    if not isinstance(token, int) or isinstance(token, bool):
        raise RequestError(name, f"{name}: {_shown(token)} is no integer token id")
    if token < 0:
        raise RequestError(name, f"{name}: {_shown(token)} is no token id; they start at 0")


def _need_in_vocabulary(name: str, tokens: Iterable[int], vocab_size: int, *, is_value: bool = True) -> None:
    """Raise RequestError for a token id that does not exist. `is_value`: `tokens` are the value of the field itself."""
    for token in tokens:
        if not 0 <= token < vocab_size:
            path = f"{name}.{token}" if isinstance(tokens, Mapping) else f"{name}[{list(tokens).index(token)}]"
            path = path if is_value else name
            raise RequestError(path, f"{path} has token id {_shown(token)}; the vocabulary has {vocab_size} entries")


def _id_of(key: object) -> object:
    """Convert a JSON object's key to a token id if it is one."""
    return int(key) if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 20 else key


def _is_default(value: object, default: object) -> bool:
    return value is default or (type(value) is type(default) and value == default)


def _shown(value: object) -> str:
    """Return a value for a message, shortened."""
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 128:
        return "a huge integer"
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


_CHECKS: Final[dict[str, Check]] = {
    "n": _int("n"),
    "presence_penalty": _number("presence_penalty"),
    "frequency_penalty": _number("frequency_penalty"),
    "repetition_penalty": _number("repetition_penalty"),
    "temperature": _number("temperature"),
    "top_p": _number("top_p"),
    "top_k": _int("top_k"),
    "min_p": _number("min_p"),
    "seed": _optional(_int("seed")),
    "stop": _optional(_words("stop")),
    "stop_token_ids": _optional(_ids("stop_token_ids", may_be_empty=True)),
    "ignore_eos": _flag,
    "max_tokens": _optional(_int("max_tokens")),
    "min_tokens": _int("min_tokens"),
    "logprobs": _optional(_int("logprobs")),
    "prompt_logprobs": _optional(_int("prompt_logprobs")),
    "logprob_token_ids": _optional(_ids("logprob_token_ids", may_be_empty=True)),
    "detokenize": _flag,
    "skip_special_tokens": _flag,
    "spaces_between_special_tokens": _flag,
    "include_stop_str_in_output": _flag,
    "output_kind": _instance(RequestOutputKind, "a RequestOutputKind"),
    "stream_interval": _optional(_int("stream_interval")),
    "skip_clone": _flag,
    "logit_bias": _optional(_bias),
    "allowed_token_ids": _optional(_ids("allowed_token_ids", may_be_empty=False)),
    "bad_words": _optional(_words("bad_words")),
    "extra_args": _optional(_json_object),
    "skip_reading_prefix_cache": _optional(_flag),
    "structured_outputs": _optional(_instance(StructuredOutputsParams, "StructuredOutputsParams")),
    "thinking_token_budget": _optional(_int("thinking_token_budget")),
    "repetition_detection": _optional(_repetition),
    "truncate_prompt_tokens": _optional(_int("truncate_prompt_tokens")),
    "truncation_side": _side,
}
"""Check of each field. Together with NOT_YET this covers every field."""

SamplingParams.__struct_fields__ = tuple(f.name for f in fields(SamplingParams))

_DEFAULTS: Final[dict[str, Any]] = {f.name: f.default for f in fields(SamplingParams) if f.default is not MISSING}
