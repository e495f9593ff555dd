"""Fields that clients of other servers send with generation requests and that have no effect here.

Each is a hint, because a response is correct without it, or refused, because a response would be wrong without it.
Undeclared fields are accepted like hints; declaring one documents the reason.
"""

from __future__ import annotations

from typing import Any, Final

from pagoda.server.http.body import RequestBody, hint, unsupported

_BOOKKEEPING: Final = "the client's own bookkeeping"
_ROUTING: Final = "a router of several providers acts on it"
_LOADING: Final = "the model stays loaded; set at server start"
_CACHING: Final = "prompt prefixes are cached automatically"
_SAMPLER: Final = "a sampler that is not implemented; the other sampling fields apply"
_ALIAS: Final = "another server's name; use the standard field"
_REPORT: Final = "not reported"
_SLOTS: Final = "requests are scheduled automatically"


class ClientHints(RequestBody):
    """Fields of other servers and clients without effect on a generated text."""

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
    n_predict: Any = hint(-1, why=_ALIAS)
    n_keep: Any = hint(0, why="prompts are not shifted")
    n_discard: Any = hint(0, why="prompts are not shifted")
    n_indent: Any = hint(0, why="infill of lines is not supported")
    n_probs: Any = hint(0, why="use logprobs")
    n_cache_reuse: Any = hint(0, why=_CACHING)
    id_slot: Any = hint(-1, why=_SLOTS)
    slot_id: Any = hint(-1, why=_SLOTS)
    samplers: Any = hint(why="the order of samplers is fixed")
    min_keep: Any = hint(0, why=_SAMPLER)
    typical_p: Any = hint(1.0, harmless=(1, 0), why=_SAMPLER)
    tfs_z: Any = hint(1.0, harmless=(1,), why=_SAMPLER)
    top_n_sigma: Any = hint(-1.0, harmless=(-1, 0, 0.0), why=_SAMPLER)
    xtc_probability: Any = hint(0.0, harmless=(0,), why=_SAMPLER)
    xtc_threshold: Any = hint(why=_SAMPLER)
    mirostat: Any = hint(0, why=_SAMPLER)
    mirostat_tau: Any = hint(why=_SAMPLER)
    mirostat_eta: Any = hint(why=_SAMPLER)
    dynatemp_range: Any = hint(0.0, harmless=(0,), why=_SAMPLER)
    dynatemp_exponent: Any = hint(why=_SAMPLER)
    dry_multiplier: Any = hint(0.0, harmless=(0,), why=_SAMPLER)
    dry_base: Any = hint(why=_SAMPLER)
    dry_allowed_length: Any = hint(why=_SAMPLER)
    dry_penalty_last_n: Any = hint(0, why=_SAMPLER)
    dry_sequence_breakers: Any = hint(why=_SAMPLER)
    repeat_penalty: Any = hint(1.0, harmless=(1,), why="use repetition_penalty")
    repeat_last_n: Any = hint(why="penalties consider the whole sequence")
    timings_per_token: Any = hint(why=_REPORT)
    return_progress: Any = hint(why=_REPORT)
    post_sampling_probs: Any = hint(why=_REPORT)
    reasoning_format: Any = hint(harmless=("auto",), why="set by --reasoning-parser")
    t_max_predict_ms: Any = hint(0, why="use max_tokens")
    image_data: Any = unsupported(why="this version serves text only")
    lora: Any = unsupported(why="adapters are chosen by model name")

    # text-generation-webui and servers with its fields
    max_new_tokens: Any = hint(why=_ALIAS)
    do_sample: Any = hint(True, why="temperature 0 is greedy")
    add_bos_token: Any = hint(True, why="use add_special_tokens")
    rep_pen: Any = hint(1.0, harmless=(1,), why="use repetition_penalty")
    rep_pen_range: Any = hint(0, why="penalties consider the whole sequence")
    repetition_penalty_range: Any = hint(0, why="penalties consider the whole sequence")
    repetition_decay: Any = hint(0, why=_SAMPLER)
    encoder_repetition_penalty: Any = hint(1.0, harmless=(1,), why=_SAMPLER)
    no_repeat_ngram_size: Any = hint(0, why=_SAMPLER)
    penalty_alpha: Any = hint(0.0, harmless=(0,), why=_SAMPLER)
    epsilon_cutoff: Any = hint(0.0, harmless=(0,), why=_SAMPLER)
    eta_cutoff: Any = hint(0.0, harmless=(0,), why=_SAMPLER)
    top_a: Any = hint(0.0, harmless=(0,), why=_SAMPLER)
    typical: Any = hint(1.0, harmless=(1,), why=_SAMPLER)
    tfs: Any = hint(1.0, harmless=(1,), why=_SAMPLER)
    skew: Any = hint(0.0, harmless=(0,), why=_SAMPLER)
    smoothing_factor: Any = hint(0.0, harmless=(0,), why=_SAMPLER)
    smoothing_curve: Any = hint(1.0, harmless=(1,), why=_SAMPLER)
    nsigma: Any = hint(0.0, harmless=(0,), why=_SAMPLER)
    dynamic_temperature: Any = hint(why=_SAMPLER)
    dynatemp_low: Any = hint(why=_SAMPLER)
    dynatemp_high: Any = hint(why=_SAMPLER)
    mirostat_mode: Any = hint(0, why=_SAMPLER)
    temperature_last: Any = hint(why="the order of samplers is fixed")
    temp_last: Any = hint(why="the order of samplers is fixed")
    sampler_priority: Any = hint(why="the order of samplers is fixed")
    sampler_order: Any = hint(why="the order of samplers is fixed")
    truncation_length: Any = hint(why="set at server start by --max-model-len")
    token_healing: Any = hint(why=_SAMPLER)
    speculative_ngram: Any = hint(why="set at server start by --speculative-config")
    ban_eos_token: Any = unsupported(why="use ignore_eos")
    banned_tokens: Any = unsupported(harmless=("",), why="use bad_words")
    custom_token_bans: Any = unsupported(harmless=("",), why="use bad_words")
    banned_strings: Any = unsupported(harmless=("",), why="use bad_words")
    grammar_string: Any = unsupported(harmless=("",), why="use grammar")
    guidance_scale: Any = unsupported(1.0, harmless=(1,), why="there is no classifier-free guidance")
    negative_prompt: Any = unsupported(harmless=("",), why="there is no classifier-free guidance")
