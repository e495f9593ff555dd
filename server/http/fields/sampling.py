"""The sampling fields that chat and text completions share, and how they become SamplingParams."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import Field

from pagoda.common.beam_search import BeamSearchParams
from pagoda.common.errors import RequestError
from pagoda.common.sampling_params import RepetitionDetectionParams, RequestOutputKind, SamplingParams
from pagoda.server.http.fields.base import INT64_MAX, Int64, RequestBody, StringOrList, hint, unsupported
from pagoda.server.http.fields.structured import StructuredFields
from pagoda.server.http.fields.usage import StreamOptions

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
"""Fields that a beam search has no use for -> values that say nothing."""


class RepetitionDetection(RequestBody):
    """When an answer that repeats itself ends: see RepetitionDetectionParams."""

    max_pattern_size: Int64 = 0
    min_pattern_size: Int64 = 0
    min_count: Int64 = 0


class SamplingFields(StructuredFields):
    """Fields of both completion requests. null means: the model's default, else the engine's."""

    searches_beams: ClassVar[bool] = False
    """Whether use_beam_search is honoured there."""

    model: str | None = None
    n: Int64 | None = 1
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int64 | None = None
    min_p: float | None = None
    seed: Int64 | None = None
    stop: Annotated[StringOrList, Field(max_length=4)] | None = Field(default_factory=list)
    stop_token_ids: list[Int64] | None = Field(default_factory=list)
    ignore_eos: bool | None = False
    min_tokens: Int64 | None = 0
    skip_special_tokens: bool | None = True
    spaces_between_special_tokens: bool | None = True
    include_stop_str_in_output: bool | None = False
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=INT64_MAX)] | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[Int64] | None = None
    bad_words: list[str] | None = Field(default_factory=list)
    prompt_logprobs: Int64 | None = None

    stream: bool | None = False
    stream_options: StreamOptions | None = None
    user: str | None = Field(None, description="The end user, for the request log; changes no answer.")
    priority: Int64 | None = 0
    request_id: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    return_tokens_as_token_ids: bool | None = None
    return_token_ids: bool | None = None
    vllm_xargs: dict[str, Any] | None = Field(None, description="For logits processors; refused without any.")

    truncation_side: Literal["left", "right"] | None = None
    logprob_token_ids: list[Int64] | None = Field(
        None, description="Log-probabilities of these tokens in place of the best; needs logprobs."
    )
    repetition_detection: RepetitionDetection | None = None
    stream_interval: Annotated[int, Field(ge=1, le=INT64_MAX)] | None = Field(
        None, description="Tokens between two chunks of a stream."
    )
    thinking_token_budget: Int64 | None = None
    best_of: Int64 | None = Field(
        None, description="Answers to generate; the n with the highest cumulative logprob are returned. Not in streams."
    )
    use_beam_search: bool | None = Field(
        False, description="The n best of a beam search n wide; excludes streams and what shapes single samples."
    )
    length_penalty: float | None = Field(1.0, description="Of beam search: scores are divided by length to this power.")
    early_stopping: bool | None = Field(False, description="Of beam search: end once n answers have.")

    watermarking: Any = unsupported(why="answers are not watermarked")
    session_id: Any = hint(why="requests are answered one by one and no session is kept")
    routed_experts_prompt_start: Any = unsupported(0, why="answers do not report which experts ran")
    mm_payload: Any = unsupported("tensors", harmless=("none",), why="this version serves text only")
    return_mm_kwargs: Any = unsupported(why="this version serves text only")
    kv_transfer_params: Any = unsupported(why="KV is not handed from server to server")
    ec_transfer_params: Any = unsupported(why="this version serves text only")
    return_token_offsets: bool | None = Field(
        False, description="Where each token stands in the prompt: shown by the render endpoints, refused elsewhere."
    )

    def own_name(self, field: str) -> str:
        """The name of a SamplingParams field in this request."""
        if field == "n" and self.best_of is not None:
            return "best_of"
        return {
            "extra_args": "vllm_xargs",
            "beam_width": "n",
            "structured_outputs": self.structure_field,
        }.get(field, field)

    def _best_of(self) -> int:
        n, best_of = self.n or 1, self.best_of or 0
        if self.stream:
            raise RequestError("best_of", "best_of cannot be streamed: the best is known at the end only")
        if best_of < n:
            raise RequestError("best_of", f"best_of {best_of} is below n {n}")
        return best_of

    def beam_search_params(self, params: SamplingParams, room: int) -> BeamSearchParams:
        """The search that was asked for. `params`: of the whole request; `room`: the most tokens of an answer.

        Raises RequestError naming a field that a search has no use for.
        """
        for name, neutral in _NOT_WITH_BEAMS.items():
            value = getattr(self, name)
            if value not in (None, False, *neutral) and value not in ([], {}):
                raise RequestError(name, f"{name} has no effect in a beam search; leave it out")
        if params.structured_outputs is not None:
            raise RequestError(
                "use_beam_search", "beam search holds answers to no form, of strict tools neither; leave one out"
            )
        return BeamSearchParams(
            beam_width=self.n or 1,
            max_tokens=room if params.max_tokens is None else params.max_tokens,
            ignore_eos=bool(self.ignore_eos),
            length_penalty=1.0 if self.length_penalty is None else self.length_penalty,
            include_stop_str_in_output=bool(self.include_stop_str_in_output),
            early_stopping=bool(self.early_stopping),
        )

    def check_answered(self) -> None:
        """Raises RequestError for what only a prompt's preview shows."""
        if self.return_token_offsets:
            raise RequestError("return_token_offsets", "offsets are shown by the render endpoints only; leave it out")

    def _check_beams(self) -> None:
        if self.use_beam_search:
            if not self.searches_beams:
                raise RequestError("use_beam_search", "use_beam_search is not supported here; leave it out")
        elif self.early_stopping:
            raise RequestError("early_stopping", "early_stopping needs use_beam_search")
        elif self.length_penalty not in (None, 1.0):
            raise RequestError("length_penalty", "length_penalty needs use_beam_search")

    def sampling_params(self, defaults: Mapping[str, Any], **own: Any) -> SamplingParams:
        """Params whose outputs are deltas: many in a stream, else one at the end, which wakes this process once.

        `defaults`: the model's, for fields left out. `own`: the caller's additions.

        Raises RequestError naming a field outside its bounds.
        """
        self._check_beams()
        values = {name: getattr(self, name) for name in _PASSED_ON} | {"extra_args": self.vllm_xargs} | own
        if self.repetition_detection is not None:
            values["repetition_detection"] = RepetitionDetectionParams(**self.repetition_detection.model_dump())
        if self.logprob_token_ids and values.get("logprobs") is None:
            raise RequestError("logprob_token_ids", "logprob_token_ids needs logprobs")
        if self.best_of is not None:
            values |= {"n": self._best_of(), "logprobs": values.get("logprobs") or 0}
        values = {name: defaults.get(name) if value is None else value for name, value in values.items()}
        if self.stream and self.prompt_logprobs is not None:
            raise RequestError(
                "prompt_logprobs", "prompt_logprobs are not available in a stream; leave one of them out"
            )
        kind = RequestOutputKind.DELTA if self.stream else RequestOutputKind.FINAL_ONLY
        return SamplingParams.from_optional(**values, structured_outputs=self.structure(), output_kind=kind)
