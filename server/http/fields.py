"""Request fields that several APIs share, and log-probabilities in their responses.

Structured outputs and sampling fields become SamplingParams. Unions refuse unsupported types by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import BeforeValidator, Discriminator, Field, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from pagoda.common.beam_search import BeamSearchParams
from pagoda.common.errors import RequestError
from pagoda.common.sampling_params import (
    RepetitionDetectionParams,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
)
from pagoda.common.text.chat_template import MEDIA_PARTS, TEXT_ONLY, template_kwargs_error
from pagoda.common.text.tokenizer import Tokenizer, TokenPieces
from pagoda.server.http.body import Ignored, Int64, RequestBody, hint, unsupported
from pagoda.server.http.client_hints import OTHER_NAMES, ClientHints
from pagoda.server.outputs import Logprob, LogprobsOnePosition, PromptLogprobs
from pagoda.server.settings.extra_samplers import EXTRA_SAMPLERS

# Prompts and chat templates.

_IDS: Final = {"type": "array", "items": {"type": "integer"}}
_TEXTS: Final = {"type": "array", "items": {"type": "string"}}
PROMPTS_SCHEMA: Final[dict[str, Any]] = {"anyOf": [{"type": "string"}, _TEXTS, _IDS, {"type": "array", "items": _IDS}]}
"""JSON schema of a text, texts, token ids, or lists of token ids."""


def is_token_ids(value: Any) -> bool:
    """Return whether a JSON value is a non-empty list of integers."""
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


def is_prompts(values: Sequence[Any]) -> bool:
    """Return whether JSON values are all texts or all token ids."""
    return all(isinstance(item, str) for item in values) or all(map(is_token_ids, values))


def check_template_kwargs(kwargs: Mapping[str, Any] | None) -> None:
    """Raise RequestError for chat_template_kwargs that the server sets itself."""
    fault = template_kwargs_error(kwargs or {})
    if fault:
        raise RequestError("chat_template_kwargs", f"chat_template_kwargs {fault}")


# Structured outputs, in OpenAI's fields, vLLM's and vLLM's former `guided_*`.


class TextFormat(RequestBody):
    """Unconstrained text."""

    type: Literal["text"]


class JsonObjectFormat(RequestBody):
    """Any JSON object, or as llama.cpp and others have it, one that conforms to a schema."""

    type: Literal["json_object"]
    json_schema: dict[str, Any] | bool | None = Field(None, alias="schema")


class NamedSchema(RequestBody):
    """A JSON schema."""

    name: str | None = None
    description: str | None = None
    json_schema: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: bool | None = None  # It has no effect: output always conforms to its schema.


class JsonSchemaFormat(RequestBody):
    """JSON that conforms to a schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


class StructuralTagFormat(RequestBody):
    """Text with constrained sections between tags: vLLM's `format`, or OpenAI's `structures` and `triggers`."""

    type: Literal["structural_tag"]
    format: dict[str, Any] | None = None
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None


ResponseFormat = Annotated[
    TextFormat | JsonObjectFormat | JsonSchemaFormat | StructuralTagFormat, Field(discriminator="type")
]


class StructuredOutputs(RequestBody):
    """vLLM's structured_outputs: exactly one constraint, and options for JSON."""

    json_schema: dict[str, Any] | str | bool | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | None = None
    disable_fallback: bool | None = Field(None, description="No effect: there is no fallback backend.")
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    whitespace_pattern: str | None = None

    def params(self) -> StructuredOutputsParams:
        """Return the constraint. Raise RequestError unless there is exactly one."""
        return StructuredOutputsParams(
            json=self.json_schema,
            regex=self.regex,
            choice=self.choice,
            grammar=self.grammar,
            json_object=self.json_object,
            structural_tag=self.structural_tag,
            disable_any_whitespace=bool(self.disable_any_whitespace),
            disable_additional_properties=bool(self.disable_additional_properties),
            whitespace_pattern=self.whitespace_pattern,
        )


_GUIDED: Final = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "grammar": "grammar",
    "json_schema": "json",
}
"""Field of vLLM's former interface or llama.cpp's -> its field of StructuredOutputsParams."""

_UNSET: Final[Mapping[str, Any]] = {"grammar": "", "json_schema": {}}
"""Values that mean "unconstrained" in llama.cpp's clients."""

_STRUCTURE_FIELDS: Final = ("response_format", "structured_outputs", *_GUIDED)


class StructuredFields(RequestBody):
    """Structured-output fields of every request that generates text."""

    response_format: ResponseFormat | None = Field(None, description="Constraint on the output, in OpenAI's form.")
    structured_outputs: StructuredOutputs | None = Field(None, description="Constraint on the output, in vLLM's form.")
    guided_json: dict[str, Any] | str | None = Field(None, description="As structured_outputs.json.")
    guided_regex: str | None = Field(None, description="As structured_outputs.regex.")
    guided_choice: list[str] | None = Field(None, description="As structured_outputs.choice.")
    guided_grammar: str | None = Field(None, description="As structured_outputs.grammar.")
    guided_whitespace_pattern: str | None = Field(None, description="As structured_outputs.whitespace_pattern.")
    grammar: str | None = Field(None, description="GBNF or Lark grammar, as structured_outputs.grammar.")
    json_schema: dict[str, Any] | None = Field(None, description="JSON schema, as structured_outputs.json.")
    guided_decoding_backend: Any = hint(
        harmless=("auto", "guidance"), why="the backend is chosen by --structured-outputs-config"
    )

    def structure(self) -> StructuredOutputsParams | None:
        """Return the output constraint; None for unconstrained text. Raise RequestError naming the field."""
        constraints = self._given()
        if len(constraints) > 1:
            for name in constraints:
                self._constraint(name)  # An invalid constraint is reported first.
            first, second = constraints[:2]
            raise RequestError(second, f"{second} and {first} both constrain the output; leave one of them out")
        constraint = self._constraint(constraints[0]) if constraints else None
        if self.guided_whitespace_pattern is not None and "guided_json" not in constraints:
            raise RequestError("guided_whitespace_pattern", "guided_whitespace_pattern needs guided_json")
        return constraint

    @property
    def gives_structure(self) -> bool:
        """Whether any field sets a constraint."""
        return bool(self._given())

    @property
    def structure_field(self) -> str:
        """The name of the field that sets the constraint."""
        return next(iter(self._given()), "structured_outputs")

    def _given(self) -> list[str]:
        values = ((name, getattr(self, name)) for name in _STRUCTURE_FIELDS)
        return [
            name
            for name, value in values
            if value is not None and not isinstance(value, TextFormat) and value != _UNSET.get(name)
        ]

    def _constraint(self, name: str) -> StructuredOutputsParams:
        value = getattr(self, name)
        if name == "structured_outputs":
            params: StructuredOutputsParams = value.params()
            return params
        if name == "response_format":
            return _of_format(value)
        if name == "guided_choice" and not value:
            raise RequestError(name, "guided_choice is empty; list at least one choice")
        kind = _GUIDED[name]
        return StructuredOutputsParams(
            json=value if kind == "json" else None,
            regex=value if kind == "regex" else None,
            choice=value if kind == "choice" else None,
            grammar=value if kind == "grammar" else None,
            whitespace_pattern=self.guided_whitespace_pattern if name == "guided_json" else None,
        )


def _of_format(response_format: JsonObjectFormat | JsonSchemaFormat | StructuralTagFormat) -> StructuredOutputsParams:
    name = "response_format"
    if isinstance(response_format, JsonObjectFormat):
        if response_format.json_schema:
            return StructuredOutputsParams(json=response_format.json_schema)
        return StructuredOutputsParams(json_object=True)
    if isinstance(response_format, JsonSchemaFormat):
        if response_format.json_schema.json_schema is None:
            field = f"{name}.json_schema.schema"
            raise RequestError(field, f"{field} is missing; for any object use type json_object")
        return StructuredOutputsParams(json=response_format.json_schema.json_schema)
    return StructuredOutputsParams(structural_tag=response_format.model_dump(exclude_none=True))


# Streaming.


class StreamOptions(RequestBody):
    """Options of a stream."""

    include_usage: bool | None = Field(False)
    continuous_usage_stats: bool | None = Field(False)
    include_obfuscation: Any = hint(why="streams are not padded")


def ignored_stream_options(stream: bool | None, options: StreamOptions | None) -> Iterator[Ignored]:
    """Yield stream_options without a stream, and running counts without a final one."""
    if options is None:
        return
    if not stream:
        yield Ignored("stream_options", "hint", "stream_options has no effect without stream; leave it out")
    elif options.continuous_usage_stats and not options.include_usage:
        name = "stream_options.continuous_usage_stats"
        yield Ignored(name, "hint", f"{name} has no effect without include_usage; leave it out")


# Stop strings.


def _stop_list(value: Any) -> Any:
    """Return stop strings as a list without empty ones, which clients send for "none"."""
    if isinstance(value, str):
        value = [value]
    return [item for item in value if item != ""] if isinstance(value, list) else value


StopStrings = Annotated[
    list[str],
    BeforeValidator(_stop_list),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}),
]
"""A string or a list of strings, parsed to a list without empty ones. Generation checks --max-stop-strings."""


# Sampling.

_PASSED_ON: Final = (
    "n",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "min_tokens",
    "prompt_logprobs",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "truncate_prompt_tokens",
    "truncation_side",
    "logprob_token_ids",
    "stream_interval",
    "thinking_token_budget",
)
"""Fields that SamplingParams has under the same name; it checks their bounds."""


_NOT_WITH_BEAMS: Final[dict[str, tuple[Any, ...]]] = {
    "stream": (),
    "best_of": (),
    "temperature": (0, 1),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "repeat_penalty": (1,),
    "rep_pen": (1,),
    "typical_p": (1,),
    "xtc_probability": (0,),
    "no_repeat_ngram_size": (0,),
    "top_p": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "min_tokens": (0,),
    "stop": (),
    "stop_token_ids": (),
    "logit_bias": (),
    "allowed_token_ids": (),
    "bad_words": (),
    "logprobs": (),
    "prompt_logprobs": (),
    "truncate_prompt_tokens": (),
    "repetition_detection": (),
    "thinking_token_budget": (),
    "vllm_xargs": (),
}
"""Fields that beam search does not support -> their values without effect."""


_UNTIL_CONTEXT: Final = -2
"""n_predict of llama.cpp: until the context is full, which ends an answer here, too."""

_UNSAID: Final[Mapping[str, tuple[int, ...]]] = {"max_tokens": (-1, _UNTIL_CONTEXT), "repetition_penalty": (1,)}
"""Values without effect, which clients send beside another name's."""

_OF_CONTEXT: Final = "max_length"
"""Elsewhere the length of the context: another name of max_tokens takes precedence."""


class RepetitionDetection(RequestBody):
    """RepetitionDetectionParams: when a repetitive output ends."""

    max_pattern_size: Int64 = 0
    min_pattern_size: Int64 = 0
    min_count: Int64 = 0


class SamplingFields(StructuredFields, ClientHints):
    """Fields of chat and text completions. null: the model's default, else SamplingParams'."""

    searches_beams: ClassVar[bool] = False  # Whether use_beam_search is supported.

    model: str | None = Field(None, description="Name of a served model or adapter; null: the first served model.")
    n: Int64 | None = 1
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int64 | None = None
    min_p: float | None = None
    seed: Int64 | None = None
    stop: StopStrings | None = Field(default_factory=list)
    stop_token_ids: list[Int64] | None = Field(default_factory=list)
    ignore_eos: bool | None = False
    min_tokens: Int64 | None = 0
    skip_special_tokens: bool | None = True
    spaces_between_special_tokens: bool | None = True
    include_stop_str_in_output: bool | None = False
    truncate_prompt_tokens: Int64 | None = None
    logit_bias: Annotated[dict[str, float], BeforeValidator(lambda value: {} if value == [] else value)] | None = None
    allowed_token_ids: list[Int64] | None = None
    bad_words: list[str] | None = Field(default_factory=list)
    prompt_logprobs: Int64 | None = None

    stream: bool | None = Field(False, description="Send the output as server-sent events while it is generated.")
    stream_options: StreamOptions | None = Field(None, description="What a stream contains beside the output.")
    user: str | None = Field(
        None,
        description="End user id for the request log; a cache hint if there is no other. Does not affect the output.",
    )
    prompt_cache_key: str | None = Field(
        None, description="Cache hint: requests with the same key run where its prefixes are, which are kept longer."
    )
    session_id: str | None = Field(None, description="As prompt_cache_key.")
    priority: Int64 | None = Field(0, description="Lower values run first; needs --scheduling-policy priority.")
    request_id: Annotated[str, Field(min_length=1, max_length=256)] | None = Field(
        None, description="Id of the request; the header X-Request-Id has precedence."
    )
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = Field(
        None, description="Only requests with the same salt share cached prefixes."
    )
    return_tokens_as_token_ids: bool | None = Field(
        None, description="Represent tokens in logprobs as token_id:N; null: as --return-tokens-as-token-ids."
    )
    return_token_ids: bool | None = Field(None, description="Include the token ids of prompt and output.")
    vllm_xargs: dict[str, Any] | None = Field(
        None, description="Arguments of custom logits processors; a hint if the server has none."
    )

    truncation_side: Literal["left", "right"] | None = None
    logprob_token_ids: list[Int64] | None = Field(
        None, description="Report log-probabilities of these tokens instead of the best ones; needs logprobs."
    )
    repetition_detection: RepetitionDetection | None = None
    stream_interval: Int64 | None = Field(None, description="Tokens per chunk of a stream.")
    thinking_token_budget: Int64 | None = None
    best_of: Int64 | None = Field(
        None,
        description="Number of completions to generate; the n with the highest cumulative logprob are returned. "
        "Not with stream.",
    )
    use_beam_search: bool | None = Field(
        False, description="Beam search of width n; excludes stream and sampling fields."
    )
    length_penalty: float | None = Field(
        1.0, description="Beam search: scores are divided by the length to this power."
    )
    early_stopping: bool | None = Field(False, description="Beam search: stop once n completions have ended.")

    num_ctx: Int64 | None = Field(None, description="Context length of Ollama; refused if the prompt is longer.")
    options: dict[str, Any] | None = Field(
        None, description="Options of Ollama, reported as ignored; num_ctx is refused if the prompt is longer."
    )

    watermarking: Any = unsupported(why="outputs are not watermarked")
    routed_experts_prompt_start: Any = unsupported(0, why="routed experts are not reported")
    mm_payload: Any = unsupported("tensors", harmless=("none",), why="this version serves text only")
    return_mm_kwargs: Any = unsupported(why="this version serves text only")
    kv_transfer_params: Any = unsupported(why="KV blocks are not transferred between servers", idle=True)
    ec_transfer_params: Any = unsupported(why="this version serves text only", idle=True)
    return_token_offsets: bool | None = Field(
        False, description="Return each token's character offsets in the prompt; render endpoints only."
    )

    def ignored(self, path: str = "") -> Iterator[Ignored]:
        """Yield the ignored parts, options without effect among them."""
        yield from super().ignored(path)
        yield from ignored_stream_options(self.stream, self.stream_options)
        if self.max_length is not None and self.chosen("max_tokens") != (_OF_CONTEXT, self.max_length):
            yield Ignored(_OF_CONTEXT, "hint", f"{_OF_CONTEXT} has no effect beside max_tokens; leave it out")
        if self.options:
            yield Ignored("options", "hint", "options has no effect: they are Ollama's; use the request's own fields")

    @property
    def cache_hint(self) -> str | None:
        """What the client names its conversation or its user by."""
        return self.prompt_cache_key or self.session_id or self.user

    @property
    def gives_cache_key(self) -> bool:
        """Whether the client names its conversation, so that the usage says how much of its prompt was cached."""
        return self.prompt_cache_key is not None or self.session_id is not None

    @property
    def limits_context(self) -> bool:
        """Whether the client asks for a context length."""
        return self.num_ctx is not None or "num_ctx" in (self.options or {})

    def check_context(self, num_tokens: int) -> None:
        """Raise RequestError if a prompt of `num_tokens` exceeds the context length that the client asks for."""
        for name, limit in (("num_ctx", self.num_ctx), ("options.num_ctx", (self.options or {}).get("num_ctx"))):
            if isinstance(limit, int) and 0 < limit < num_tokens:
                raise RequestError(
                    name,
                    f"{name} {limit} is below the prompt's {num_tokens} tokens, and prompts are not cut to fit; "
                    "leave it out, or set truncate_prompt_tokens",
                )

    def own_name(self, field: str) -> str:
        """Return the name of a SamplingParams field in this API."""
        if field == "n" and self.selects_best:
            return "best_of"
        if field in OTHER_NAMES:
            return self.chosen(field)[0]
        return {
            "extra_args": "vllm_xargs",
            "beam_width": "n",
            "structured_outputs": self.structure_field,
        }.get(field, field)

    @property
    def selects_best(self) -> bool:
        """Whether more completions are generated than returned."""
        return self.best_of is not None and self.best_of != (self.n or 1)

    def _best_of(self) -> int:
        n = self.n or 1
        best_of = self.best_of or 0
        if self.stream:
            raise RequestError("best_of", "best_of cannot be streamed: the best are only known at the end")
        if best_of < n:
            raise RequestError("best_of", f"best_of {best_of} is below n {n}")
        return best_of

    def beam_search_params(self, params: SamplingParams, max_tokens: int) -> BeamSearchParams:
        """Return the parameters of the beam search. `max_tokens`: default of the field, in tokens.

        Raise RequestError naming a field that beam search does not support.
        """
        for name, neutral in _NOT_WITH_BEAMS.items():
            value = getattr(self, name)
            if value not in (None, False, *neutral) and value not in ([], {}):
                raise RequestError(name, f"{name} has no effect with beam search; leave it out")
        if params.structured_outputs is not None:
            raise RequestError(
                "use_beam_search", "beam search does not support structured outputs or strict tools; leave one out"
            )
        return BeamSearchParams(
            beam_width=self.n or 1,
            max_tokens=max_tokens if params.max_tokens is None else params.max_tokens,
            ignore_eos=bool(self.ignore_eos),
            length_penalty=1.0 if self.length_penalty is None else self.length_penalty,
            include_stop_str_in_output=bool(self.include_stop_str_in_output),
            early_stopping=bool(self.early_stopping),
        )

    def check_generation_fields(self) -> None:
        """Raise RequestError for fields that only the render endpoints support."""
        if self.return_token_offsets:
            raise RequestError(
                "return_token_offsets", "return_token_offsets is for the render endpoints only; leave it out"
            )

    def _check_beams(self) -> None:
        if self.use_beam_search:
            if not self.searches_beams:
                raise RequestError("use_beam_search", "use_beam_search is not supported here; leave it out")
        elif self.early_stopping:
            raise RequestError("early_stopping", "early_stopping needs use_beam_search")
        elif self.length_penalty not in (None, 1.0):
            raise RequestError("length_penalty", "length_penalty needs use_beam_search")

    def own_value(self, name: str) -> tuple[str, Any]:
        """Return the name under which this API has a field of OTHER_NAMES, and its value if it is given."""
        return name, getattr(self, name) if name in self.model_fields_set else None

    def chosen(self, name: str) -> tuple[str, Any]:
        """Return under which of its names a field is given, and its value; None if under none.

        Raise RequestError for two values.
        """
        own_name, value = self.own_value(name)
        values = {own_name: value} | {alias: getattr(self, alias) for alias in OTHER_NAMES[name]}
        values = {alias: value for alias, value in values.items() if value is not None}
        if len(values) > 1:
            values = {alias: value for alias, value in values.items() if value not in _UNSAID[name]} or values
        if len(values) > 1:
            values.pop(_OF_CONTEXT, None)
        if len(set(values.values())) > 1:
            first, second = list(values)[:2]
            raise RequestError(second, f"{second} and {first} are the same field and differ; leave one of them out")
        return next(iter(values.items()), (own_name, None))

    @property
    def token_limit(self) -> int | None:
        """max_tokens, given under one of its names; None: not given, -1: unlimited. Raises as `chosen` does."""
        limit: int | None = self.chosen("max_tokens")[1]
        return -1 if limit == self.n_predict == _UNTIL_CONTEXT else limit

    def of_extra_samplers(self) -> dict[str, float]:
        """Return the arguments of EXTRA_SAMPLERS that are set."""
        arguments: dict[str, float] = {}
        for sampler in EXTRA_SAMPLERS.values():
            set_arguments = {name: getattr(self, name) for name in sampler.arguments if getattr(self, name) is not None}
            switch = next(iter(sampler.arguments))
            if set_arguments.get(switch, sampler.arguments[switch].neutral) != sampler.arguments[switch].neutral:
                arguments |= set_arguments
        return arguments

    def sampling_params(self, defaults: Mapping[str, Any], **overrides: Any) -> SamplingParams:
        """Return the verified SamplingParams: delta outputs for a stream, else a single final output.

        `defaults`: the model's generation config. `overrides`: values that take precedence over the fields. Raise
        RequestError naming a field outside its bounds.
        """
        self._check_beams()
        values = {name: getattr(self, name) for name in _PASSED_ON} | overrides
        values["repetition_penalty"] = self.chosen("repetition_penalty")[1]
        values["extra_args"] = {**(self.vllm_xargs or {}), **self.of_extra_samplers()} or None
        if self.do_sample is False:
            values["temperature"] = 0.0
        if self.repetition_detection is not None:
            values["repetition_detection"] = RepetitionDetectionParams(**self.repetition_detection.model_dump())
        if self.logprob_token_ids and values.get("logprobs") is None:
            raise RequestError("logprob_token_ids", "logprob_token_ids needs logprobs")
        if self.selects_best:
            values |= {"n": self._best_of(), "logprobs": values.get("logprobs") or 0}
        values = {name: defaults.get(name) if value is None else value for name, value in values.items()}
        if self.stream and self.prompt_logprobs is not None:
            raise RequestError("prompt_logprobs", "prompt_logprobs cannot be streamed; leave one of them out")
        kind = RequestOutputKind.DELTA if self.stream else RequestOutputKind.FINAL_ONLY
        return SamplingParams.from_optional(**values, structured_outputs=self.structure(), output_kind=kind)


# Log-probabilities in the formats of the chat API, the completions API, and vLLM's prompt_logprobs.

LOWEST: Final = -9999.0
"""Replaces minus infinity, which JSON has no number for."""


class TokenNames:
    """Token strings of log-probabilities: what the token adds to the text, or token_id:N with `as_ids` or without a
    tokenizer.
    """

    def __init__(self, tokenizer: Tokenizer | None, *, as_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids

    def text(self, token: int, logprob: Logprob | None = None) -> str:
        """Return the token as a string; without its log-probability, which knows the tokens before it, as the first one
        of a text.
        """
        if self._tokenizer is None or self._as_ids:
            return f"token_id:{token}"
        if logprob is None or logprob.decoded_token is None:
            return TokenPieces(self._tokenizer).push(token)
        return logprob.decoded_token

    def raw(self, token: int) -> list[int]:
        """Return the token's bytes, which may be part of a character."""
        if self._tokenizer is None:
            return list(self.text(token).encode())
        return list(self._tokenizer.token_bytes(token))


def _finite(value: float) -> float:
    """Return the log-probability, at least LOWEST."""
    return max(value, LOWEST)


def _ranked(position: LogprobsOnePosition, count: int) -> list[tuple[int, Logprob]]:
    """Return the `count` most likely candidates of a position, best first; -1: all."""
    ranked = sorted(position.items(), key=lambda item: -item[1].logprob)
    return ranked if count < 0 else ranked[:count]


def chat_logprobs(positions: Sequence[LogprobsOnePosition], count: int, names: TokenNames) -> list[dict[str, Any]]:
    """Return `logprobs.content`: one entry per generated token with its `count` best candidates."""

    def entry(token: int, logprob: Logprob) -> dict[str, Any]:
        return {"token": names.text(token, logprob), "logprob": _finite(logprob.logprob), "bytes": names.raw(token)}

    return [
        entry(*next(iter(position.items()))) | {"top_logprobs": [entry(*item) for item in _ranked(position, count)]}
        for position in positions
    ]


class CompletionLogprobs:
    """Builds `logprobs` of the completions API, whose text_offset continues from chunk to chunk.

    Tokens join to the text. Those of one character have the offset at which it begins, and all but the last are "".
    """

    def __init__(self, count: int, names: TokenNames) -> None:
        self._count = count
        self._names = names
        self._offset = 0

    def take(self, token_ids: Sequence[int], positions: Sequence[LogprobsOnePosition | None]) -> dict[str, Any]:
        """Return the entries of the next tokens; null for a position without log-probabilities (a prompt's first)."""
        tokens = []
        logprobs = []
        tops = []
        offsets = []
        for token, position in zip(token_ids, positions):
            chosen = None if position is None else position.get(token)
            text = self._names.text(token, chosen)
            offsets.append(self._offset)
            self._offset += len(text)
            tokens.append(text)
            logprobs.append(None if chosen is None else _finite(chosen.logprob))
            tops.append(None if position is None else self._top(token, position))
        return {"text_offset": offsets, "token_logprobs": logprobs, "tokens": tokens, "top_logprobs": tops}

    def _top(self, token: int, position: LogprobsOnePosition) -> dict[str, float]:
        """Return the chosen token, then the best candidates, as vLLM does."""
        candidates = ({token: position[token]} if token in position else {}) | dict(_ranked(position, self._count))
        top: dict[str, float] = {}
        for candidate, logprob in candidates.items():
            top.setdefault(self._names.text(candidate, logprob), _finite(logprob.logprob))
        return top


def join_logprobs(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Concatenate chunks of completion logprobs."""
    keys = ("text_offset", "token_logprobs", "tokens", "top_logprobs")
    return {key: [item for part in parts for item in part[key]] for key in keys}


def prompt_logprobs(positions: PromptLogprobs) -> list[dict[str, Any] | None]:
    """Return vLLM's `prompt_logprobs`: per prompt token, token id -> logprob, rank and text; null for the first."""
    return [
        None
        if position is None
        else {
            str(token): {
                "logprob": _finite(logprob.logprob),
                "rank": logprob.rank,
                "decoded_token": logprob.decoded_token,
            }
            for token, logprob in position.items()
        }
        for position in positions
    ]


# Unions discriminated by `type`, in which unsupported types are refused by name. Tags are not identifiers, so that
# error messages can leave them out of a field's path.

OTHER = "<other>"
"""Tag of unsupported types."""

TEXT = "<text>"
LIST = "<list>"
"""Tags of a union of a string and a list."""


def by_type(*known_types: str) -> Discriminator:
    """Return a discriminator: `<type>` for the known types, else OTHER."""

    def tag(value: Any) -> str:
        kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
        return f"<{kind}>" if kind in known_types else OTHER

    return Discriminator(tag)


def text_or_list() -> Discriminator:
    """Return a discriminator: TEXT for a string, else LIST."""
    return Discriminator(lambda value: TEXT if isinstance(value, str) else LIST)


class Unsupported(RequestBody):
    """An object of an unsupported type; always refused."""

    type: str | None = None

    @model_validator(mode="before")
    @classmethod
    def refuse(cls, value: Any) -> Any:
        """Raise an error that names the type."""
        if not isinstance(value, dict):
            raise PydanticCustomError("not_an_object", "must be an object with a type")
        kind = value.get("type")
        name = repr(kind[:60]) if isinstance(kind, str) else "(missing)"
        is_media = isinstance(kind, str) and kind in MEDIA_PARTS
        reason = f": {TEXT_ONLY}" if is_media else " by this version of pagoda"
        raise PydanticCustomError(
            "unsupported", "type {kind} is not supported{reason}", {"kind": name, "reason": reason}
        )


class OtherTool(RequestBody):
    """A tool of an unsupported type, with any fields. It is dropped."""

    type: str

    def ignored(self, path: str = "") -> Iterator[Ignored]:
        """Yield this tool, but not its fields."""
        reason = f"{path}: type {self.type[:60]!r} is not supported by this version of pagoda"
        yield Ignored(path, "tool", reason, self.type)


def refused(*harmless: Any) -> BeforeValidator:
    """Return Annotated metadata of an unsupported nested field that accepts null and `harmless` only."""

    def check(value: Any) -> Any:
        if value is None or any(type(value) is type(ignorable) and value == ignorable for ignorable in harmless):
            return value
        raise PydanticCustomError("unsupported", "is not supported by this version of pagoda; leave it out")

    return BeforeValidator(check)
