"""Fields of other servers, which their clients send with generation requests.

Another name of a field here is honoured. What would change the answer and is not supported is refused. All else is a
hint: accepted and named in `x-pagoda-ignored`, as undeclared fields are; declaring one documents the reason.
"""

from __future__ import annotations

from typing import Any, Final

from pydantic import Field

from pagoda.server.http.body import Int64, RequestBody, hint, unsupported

_BOOKKEEPING: Final = "the client's own bookkeeping"
_ROUTING: Final = "a router of several providers acts on it"
_LOADING: Final = "the model stays loaded; set at server start"
_CACHING: Final = "prompt prefixes are cached automatically, for all requests"
_SAMPLER: Final = "a sampler that is not implemented"
_OF_SAMPLER: Final = "it belongs to a sampler that is not implemented"
_AS_MAX_TOKENS: Final = "As max_tokens; -1: unlimited."
_AS_REPETITION: Final = "As repetition_penalty."
_REPORT: Final = "not reported"
_SLOTS: Final = "requests are scheduled automatically"


def _carried(sampler: str) -> str:
    return f"Needs --logits-processors {sampler}, else refused unless without effect."


OTHER_NAMES: Final = {
    "max_tokens": ("n_predict", "max_new_tokens", "max_length"),
    "repetition_penalty": ("repeat_penalty", "rep_pen"),
}
"""Field -> its names in other servers."""


class ClientHints(RequestBody):
    """Fields of other servers and clients."""

    # Chat applications and agents
    client_metadata: Any = hint(why=_BOOKKEEPING)
    chat_id: Any = hint(why=_BOOKKEEPING)
    conversation_id: Any = hint(why=_BOOKKEEPING)
    message_id: Any = hint(why=_BOOKKEEPING)
    features: Any = hint(why="features of the chat application, not of the model")
    files: Any = hint(why="the client includes them in the messages")
    background_tasks: Any = hint(why=_BOOKKEEPING)

    # OpenRouter
    provider: Any = hint(why=_ROUTING)
    models: Any = hint(why=_ROUTING)
    route: Any = hint(why=_ROUTING)
    transforms: Any = hint(why=_ROUTING)
    preset: Any = hint(why=_ROUTING)
    plugins: Any = hint(why="there are no plugins for requests")
    usage: Any = hint(why="usage is always reported; in streams with stream_options.include_usage")

    # Alibaba Cloud Model Studio
    enable_search: Any = hint(why="there is no web search")
    vl_high_resolution_images: Any = hint(why="this version serves text only")

    # Ollama
    keep_alive: Any = hint(why=_LOADING)
    raw: Any = hint(why="completions use no chat template")
    format: Any = unsupported(harmless=("",), why="use response_format")
    system: Any = unsupported(harmless=("",), why="use a message of the role system")

    # llama.cpp
    cache_prompt: Any = hint(True, why=_CACHING)
    n_predict: Int64 | None = Field(None, description=_AS_MAX_TOKENS)
    n_keep: Any = hint(0, why="prompts are not shifted")
    n_discard: Any = hint(0, why="prompts are not shifted")
    n_indent: Any = hint(0, why="infill of lines is not supported")
    n_probs: Any = hint(0, why="use logprobs")
    n_cache_reuse: Any = hint(0, why=_CACHING)
    id_slot: Any = hint(-1, why=_SLOTS)
    slot_id: Any = hint(-1, why=_SLOTS)
    samplers: Any = hint(why="the order of samplers is fixed")
    min_keep: Any = hint(0, why=_OF_SAMPLER)
    typical_p: float | None = Field(None, description=_carried("typical_p"))
    tfs_z: Any = unsupported(1.0, harmless=(1,), why=_SAMPLER)
    top_n_sigma: Any = unsupported(-1.0, harmless=(-1, 0, 0.0), why=_SAMPLER)
    xtc_probability: float | None = Field(None, description=_carried("xtc"))
    xtc_threshold: float | None = Field(None, description="Of xtc_probability; default 0.1.")
    mirostat: Any = unsupported(0, why=_SAMPLER)
    mirostat_tau: Any = hint(why=_OF_SAMPLER)
    mirostat_eta: Any = hint(why=_OF_SAMPLER)
    dynatemp_range: Any = unsupported(0.0, harmless=(0,), why=_SAMPLER)
    dynatemp_exponent: Any = hint(why=_OF_SAMPLER)
    dry_multiplier: Any = unsupported(0.0, harmless=(0,), why=_SAMPLER)
    dry_base: Any = hint(why=_OF_SAMPLER)
    dry_allowed_length: Any = hint(why=_OF_SAMPLER)
    dry_penalty_last_n: Any = hint(0, why=_OF_SAMPLER)
    dry_sequence_breakers: Any = hint(why=_OF_SAMPLER)
    repeat_penalty: float | None = Field(None, description=_AS_REPETITION)
    repeat_last_n: Any = hint(why="penalties consider the whole sequence")
    timings_per_token: Any = hint(why=_REPORT)
    return_progress: Any = hint(why=_REPORT)
    post_sampling_probs: Any = hint(why=_REPORT)
    reasoning_format: Any = hint(harmless=("auto",), why="set by --reasoning-parser")
    t_max_predict_ms: Any = hint(0, why="use max_tokens")
    image_data: Any = unsupported(why="this version serves text only")
    lora: Any = unsupported(why="adapters are chosen by model name")

    # text-generation-webui and servers with its fields
    max_new_tokens: Int64 | None = Field(None, description=_AS_MAX_TOKENS)
    max_length: Int64 | None = Field(None, description="As max_tokens if that is not given: the prompt does not count.")
    do_sample: bool | None = Field(None, description="False: as temperature 0.")
    add_bos_token: bool | None = Field(None, description="As add_special_tokens; chat templates add their own.")
    rep_pen: float | None = Field(None, description=_AS_REPETITION)
    rep_pen_range: Any = hint(0, why="penalties consider the whole sequence")
    repetition_penalty_range: Any = hint(0, why="penalties consider the whole sequence")
    repetition_decay: Any = unsupported(0, why=_SAMPLER)
    encoder_repetition_penalty: Any = unsupported(1.0, harmless=(1,), why=_SAMPLER)
    no_repeat_ngram_size: Int64 | None = Field(None, description=_carried("no_repeat_ngram_size"))
    penalty_alpha: Any = unsupported(0.0, harmless=(0,), why=_SAMPLER)
    epsilon_cutoff: Any = unsupported(0.0, harmless=(0,), why=_SAMPLER)
    eta_cutoff: Any = unsupported(0.0, harmless=(0,), why=_SAMPLER)
    top_a: Any = unsupported(0.0, harmless=(0,), why=_SAMPLER)
    typical: Any = unsupported(1.0, harmless=(1,), why="use typical_p")
    tfs: Any = unsupported(1.0, harmless=(1,), why=_SAMPLER)
    skew: Any = unsupported(0.0, harmless=(0,), why=_SAMPLER)
    smoothing_factor: Any = unsupported(0.0, harmless=(0,), why=_SAMPLER)
    smoothing_curve: Any = hint(1.0, harmless=(1,), why=_OF_SAMPLER)
    nsigma: Any = unsupported(0.0, harmless=(0,), why=_SAMPLER)
    dynamic_temperature: Any = unsupported(why=_SAMPLER)
    dynatemp_low: Any = hint(why=_OF_SAMPLER)
    dynatemp_high: Any = hint(why=_OF_SAMPLER)
    mirostat_mode: Any = unsupported(0, why=_SAMPLER)
    temperature_last: Any = hint(why="the order of samplers is fixed")
    temp_last: Any = hint(why="the order of samplers is fixed")
    sampler_priority: Any = hint(why="the order of samplers is fixed")
    sampler_order: Any = hint(why="the order of samplers is fixed")
    truncation_length: Any = hint(why="set at server start by --max-model-len")
    token_healing: Any = unsupported(why=_SAMPLER)
    speculative_ngram: Any = hint(why="set at server start by --speculative-config")
    ban_eos_token: Any = unsupported(why="use ignore_eos")
    banned_tokens: Any = unsupported(harmless=("",), why="use bad_words")
    custom_token_bans: Any = unsupported(harmless=("",), why="use bad_words")
    banned_strings: Any = unsupported(harmless=("",), why="use bad_words")
    grammar_string: Any = unsupported(harmless=("",), why="use grammar")
    guidance_scale: Any = unsupported(1.0, harmless=(1,), why="there is no classifier-free guidance")
    negative_prompt: Any = unsupported(harmless=("",), why="there is no classifier-free guidance")
