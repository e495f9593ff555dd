"""Fields of other servers, which their clients send with generation requests.

Another name of a field here is honoured. What would change the answer and is not supported is refused, by
`REFUSED`. All else is accepted without effect and named in `x-pagoda-ignored`, as unknown fields are; a row of
`WITHOUT_EFFECT` gives the reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from pydantic import Field, create_model

from pagoda.server.http.body import Int64, RequestBody, hint, unsupported

_BOOKKEEPING: Final = "the client's own bookkeeping"
_ROUTING: Final = "a router of several providers acts on it"
_LOADING: Final = "the model stays loaded; set at server start"
_CACHING: Final = "prompt prefixes are cached automatically, for all requests"
_SAMPLER: Final = "a sampler that is not implemented"
_OF_SAMPLER: Final = "it belongs to a sampler that is not implemented"
_REPORT: Final = "not reported"
_SLOTS: Final = "requests are scheduled automatically"
_NO_SHIFT: Final = "prompts are not shifted"
_ORDER: Final = "the order of samplers is fixed"
_WHOLE_SEQUENCE: Final = "penalties consider the whole sequence"
_TEXT_ONLY: Final = "this version serves text only"
_NO_GUIDANCE: Final = "there is no classifier-free guidance"

WITHOUT_EFFECT: Final[Mapping[str, str]] = {
    # These are from chat applications and agents.
    "client_metadata": _BOOKKEEPING,
    "chat_id": _BOOKKEEPING,
    "conversation_id": _BOOKKEEPING,
    "message_id": _BOOKKEEPING,
    "features": "features of the chat application, not of the model",
    "files": "the client includes them in the messages",
    "background_tasks": _BOOKKEEPING,
    # These are from OpenRouter.
    "provider": _ROUTING,
    "models": _ROUTING,
    "route": _ROUTING,
    "transforms": _ROUTING,
    "preset": _ROUTING,
    "plugins": "there are no plugins for requests",
    "usage": "usage is always reported; in streams with stream_options.include_usage",
    # These are from Alibaba Cloud Model Studio.
    "enable_search": "there is no web search",
    "vl_high_resolution_images": _TEXT_ONLY,
    # These are from Ollama.
    "keep_alive": _LOADING,
    "raw": "completions use no chat template",
    # These are from llama.cpp.
    "cache_prompt": _CACHING,
    "n_keep": _NO_SHIFT,
    "n_discard": _NO_SHIFT,
    "n_indent": "infill of lines is not supported",
    "n_probs": "use logprobs",
    "n_cache_reuse": _CACHING,
    "id_slot": _SLOTS,
    "slot_id": _SLOTS,
    "samplers": _ORDER,
    "min_keep": _OF_SAMPLER,
    "mirostat_tau": _OF_SAMPLER,
    "mirostat_eta": _OF_SAMPLER,
    "dynatemp_exponent": _OF_SAMPLER,
    "dry_base": _OF_SAMPLER,
    "dry_allowed_length": _OF_SAMPLER,
    "dry_penalty_last_n": _OF_SAMPLER,
    "dry_sequence_breakers": _OF_SAMPLER,
    "repeat_last_n": _WHOLE_SEQUENCE,
    "timings_per_token": _REPORT,
    "return_progress": _REPORT,
    "post_sampling_probs": _REPORT,
    "reasoning_format": "set by --reasoning-parser",
    "t_max_predict_ms": "use max_tokens",
    # These are from text-generation-webui and servers with its fields.
    "rep_pen_range": _WHOLE_SEQUENCE,
    "repetition_penalty_range": _WHOLE_SEQUENCE,
    "smoothing_curve": _OF_SAMPLER,
    "dynatemp_low": _OF_SAMPLER,
    "dynatemp_high": _OF_SAMPLER,
    "temperature_last": _ORDER,
    "temp_last": _ORDER,
    "sampler_priority": _ORDER,
    "sampler_order": _ORDER,
    "truncation_length": "set at server start by --max-model-len",
    "speculative_ngram": "set at server start by --speculative-config",
}
"""Field -> why it has no effect."""

REFUSED: Final[Mapping[str, str]] = {
    # These are from Ollama.
    "format": "use response_format",
    "system": "use a message of the role system",
    # These are from llama.cpp.
    "tfs_z": _SAMPLER,
    "top_n_sigma": _SAMPLER,
    "mirostat": _SAMPLER,
    "dynatemp_range": _SAMPLER,
    "dry_multiplier": _SAMPLER,
    "image_data": _TEXT_ONLY,
    "lora": "adapters are chosen by model name",
    # These are from text-generation-webui and servers with its fields.
    "repetition_decay": _SAMPLER,
    "encoder_repetition_penalty": _SAMPLER,
    "penalty_alpha": _SAMPLER,
    "epsilon_cutoff": _SAMPLER,
    "eta_cutoff": _SAMPLER,
    "top_a": _SAMPLER,
    "typical": "use typical_p",
    "tfs": _SAMPLER,
    "skew": _SAMPLER,
    "smoothing_factor": _SAMPLER,
    "nsigma": _SAMPLER,
    "dynamic_temperature": _SAMPLER,
    "mirostat_mode": _SAMPLER,
    "token_healing": _SAMPLER,
    "ban_eos_token": "use ignore_eos",
    "banned_tokens": "use bad_words",
    "custom_token_bans": "use bad_words",
    "banned_strings": "use bad_words",
    "grammar_string": "use grammar",
    "guidance_scale": _NO_GUIDANCE,
    "negative_prompt": _NO_GUIDANCE,
}
"""Field that would change the answer -> why it is refused, or what to use instead."""

_TEXTS: Final = (
    *("format", "system", "banned_tokens", "custom_token_bans", "banned_strings"),
    *("grammar_string", "negative_prompt"),
)
_ZERO: Final = (
    *("n_keep", "n_discard", "n_indent", "n_probs", "n_cache_reuse", "min_keep"),
    *("mirostat", "mirostat_mode", "dynatemp_range", "t_max_predict_ms", "dry_multiplier", "dry_penalty_last_n"),
    *("rep_pen_range", "repetition_penalty_range", "repetition_decay", "penalty_alpha", "epsilon_cutoff", "eta_cutoff"),
    *("top_a", "skew", "smoothing_factor", "nsigma"),
)
_ONE: Final = ("tfs_z", "tfs", "typical", "encoder_repetition_penalty", "smoothing_curve", "guidance_scale")

NEUTRAL: Final[Mapping[str, tuple[Any, ...]]] = {
    **dict.fromkeys(_TEXTS, ("",)),
    **dict.fromkeys(_ZERO, (0,)),
    **dict.fromkeys(_ONE, (1,)),
    "id_slot": (-1,),
    "slot_id": (-1,),
    "top_n_sigma": (-1, 0),
    "cache_prompt": (True,),
    "reasoning_format": ("auto",),
}
"""Field -> values that ask for nothing, besides null, false and empty lists and objects. The first is the default, and
false is not neutral where the default is true."""

OTHER_NAMES: Final = {
    "max_tokens": ("n_predict", "max_new_tokens", "max_length"),
    "repetition_penalty": ("repeat_penalty", "rep_pen"),
}
"""Field -> its names in other servers."""


def _field(name: str) -> Any:
    """Declare a field of WITHOUT_EFFECT or REFUSED."""
    default, *more = NEUTRAL.get(name, (None,))
    if name in REFUSED:
        return unsupported(default, harmless=more, why=REFUSED[name])
    return hint(default, harmless=more, why=WITHOUT_EFFECT[name])


if TYPE_CHECKING:
    _WithoutEffect = RequestBody
else:
    _fields = {name: (Any, _field(name)) for name in (*WITHOUT_EFFECT, *REFUSED)}
    _WithoutEffect = create_model("_WithoutEffect", __base__=RequestBody, __module__=__name__, **_fields)

_AS_MAX_TOKENS: Final = "As max_tokens; -1: unlimited."
_AS_REPETITION: Final = "As repetition_penalty."


def _carried(sampler: str) -> str:
    return f"Needs --logits-processors {sampler}, else refused unless without effect."


class ClientHints(_WithoutEffect):
    """Fields of other servers and clients: those that are honoured, and those of the tables above."""

    n_predict: Int64 | None = Field(None, description=_AS_MAX_TOKENS)
    max_new_tokens: Int64 | None = Field(None, description=_AS_MAX_TOKENS)
    max_length: Int64 | None = Field(None, description="As max_tokens if that is not given: the prompt does not count.")
    repeat_penalty: float | None = Field(None, description=_AS_REPETITION)
    rep_pen: float | None = Field(None, description=_AS_REPETITION)
    typical_p: float | None = Field(None, description=_carried("typical_p"))
    xtc_probability: float | None = Field(None, description=_carried("xtc"))
    xtc_threshold: float | None = Field(None, description="Of xtc_probability; default 0.1.")
    no_repeat_ngram_size: Int64 | None = Field(None, description=_carried("no_repeat_ngram_size"))
    do_sample: bool | None = Field(None, description="False: as temperature 0.")
    add_bos_token: bool | None = Field(None, description="As add_special_tokens; chat templates add their own.")
