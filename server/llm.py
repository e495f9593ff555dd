"""LLM: offline inference. A list of prompts in, a list of outputs out."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, Unpack

from pagoda.common.beam_search import BeamSearchParams
from pagoda.common.config.without_setting import FLAGS_WITHOUT_SETTING
from pagoda.common.engine.lora.adapter import Adapter
from pagoda.common.errors import ConfigError, RequestError
from pagoda.common.pooling_params import PoolingParams
from pagoda.common.sampling_params import RequestOutputKind, SamplingParams
from pagoda.common.text import chat_template as templates
from pagoda.common.text.chat_template import RenderedChat, render_literal
from pagoda.server.api.chat_prompt import checked_tools
from pagoda.server.llm_engine import LLMEngine
from pagoda.server.outputs import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    RawPoolingOutput,
    RequestOutput,
    ScoringRequestOutput,
    with_tensor,
)
from pagoda.server.processing.beams import BeamSearchOutput, check_engine, check_prompts, search_beams, step_params
from pagoda.server.processing.inputs import (
    InputProcessor,
    PairTemplate,
    PreparedRequest,
    Prompt,
    PromptType,
    TextOptions,
    check_extras,
    is_token_ids,
    text_options,
)
from pagoda.server.processing.scoring import Pairs, ScoreOptions, Text, texts_of
from pagoda.server.settings.flags import EngineArgs
from pagoda.server.vllm.config_views import ModelView
from pagoda.server.vllm.missing_methods import ExplainsMissingMethods
from pagoda.server.vllm.request_types import BatchOptions, LoRARequest, PoolingCallOptions, TokensPrompt, shows_options
from pagoda.server.vllm.tokenizer_view import HfTokenizer

if TYPE_CHECKING:
    from pagoda.server.vllm.metrics_reader import Metric

Output = RequestOutput | RawPoolingOutput
Prompts = PromptType | Sequence[PromptType]
Params = PoolingParams | Sequence[PoolingParams] | None
Bar = bool | Callable[..., Any]
T = TypeVar("T")
Message = Mapping[str, Any]
ContentFormat = Literal["auto", "openai", "string"]


class LLM(ExplainsMissingMethods):
    """A model for offline use: `LLM(model="...").generate(["Hello"], SamplingParams(max_tokens=32))`.

    Keywords are those of EngineArgs; None means that a setting is not given. It drives one engine in this process, so
    that `data_parallel_size` above 1 is refused where each replica has an engine of its own: on all backends but
    jax_tpu. `chat_template`: the jinja template of chat(), or its file. Raises ConfigError, ModelError or WeightError
    when the model cannot be served.

    The methods for pooling models, `encode` to `score`, raise RequestError before any prompt runs. Their
    `pooling_params`: one for all prompts, a list paired with them, or None for the model's defaults; their
    `tokenization_kwargs`: add_special_tokens, truncate_prompt_tokens (also a parameter), truncation_side.
    """

    _next_id = 0

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        runner: str | None = None,
        convert: str | None = None,
        tokenizer: str | None = None,
        tokenizer_mode: str | None = None,
        skip_tokenizer_init: bool | None = None,
        trust_remote_code: bool | None = None,
        allowed_local_media_path: str | None = None,
        allowed_media_domains: Sequence[str] | None = None,
        tensor_parallel_size: int | None = None,
        dtype: Any = None,
        quantization: str | None = None,
        revision: str | None = None,
        tokenizer_revision: str | None = None,
        chat_template: str | os.PathLike[str] | None = None,
        seed: int | None = None,
        gpu_memory_utilization: float | None = None,
        cpu_offload_gb: float | None = None,
        offload_group_size: int | None = None,
        offload_num_in_group: int | None = None,
        offload_prefetch_step: int | None = None,
        offload_params: Iterable[str] | None = None,
        enforce_eager: bool | None = None,
        enable_return_routed_experts: bool | None = None,
        return_sampling_mask: bool | None = None,
        disable_custom_all_reduce: bool | None = None,
        hf_token: bool | str | None = None,
        hf_overrides: Mapping[str, Any] | Callable[[Any], Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        pooler_config: Any = None,
        structured_outputs_config: Any = None,
        profiler_config: Any = None,
        attention_config: Any = None,
        kv_cache_memory_bytes: int | None = None,
        compilation_config: Any = None,
        quantization_config: Any = None,
        logits_processors: Sequence[str | type[Any]] | None = None,
        spec_method: str | None = None,
        spec_model: str | None = None,
        spec_tokens: int | None = None,
        **kwargs: Any,
    ) -> None:
        keywords = {name: value for name, value in locals().items() if name not in ("self", "kwargs", "__class__")}
        template = keywords.pop("chat_template")
        for name in sorted(keywords.keys() & FLAGS_WITHOUT_SETTING.keys()):
            if keywords.pop(name):
                raise ConfigError(name, f"is not supported: {FLAGS_WITHOUT_SETTING[name]}")
        settings = {name: value for name, value in keywords.items() if value is not None} | kwargs
        self._start(LLMEngine(EngineArgs(**settings).create_engine_config()), template)

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> Self:
        """Load the model that the arguments describe."""
        return cls.from_engine(LLMEngine.from_engine_args(engine_args))

    @classmethod
    def from_engine(cls, engine: LLMEngine) -> Self:
        """Wrap an engine that runs already."""
        llm = cls.__new__(cls)
        llm._start(engine)
        return llm

    @shows_options(BatchOptions, use_tqdm=True)
    def generate(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        **options: Unpack[BatchOptions],
    ) -> list[RequestOutput]:
        """Generate for each prompt and return the outputs in order.

        `prompts`: one or a list of texts, token id lists, {"prompt": ...}, {"prompt_token_ids": ...} or, with
        enable_prompt_embeds, {"prompt_embeds": tensor [tokens, width]}; of an encoder-decoder model what the encoder
        reads, or {"encoder_prompt": ..., "decoder_prompt": ...}. One set of params applies to all prompts, a
        list is paired with them; None: the model's defaults. The options are those of BatchOptions.

        Raises RequestError for the first prompt that cannot be served, before any runs. Ctrl-C ends all of them.
        """
        return self._run(self._prepared(prompts, sampling_params, **options), options.get("use_tqdm", True))

    def enqueue(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        priority: int | Sequence[int] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> list[str]:
        """Queue prompts and return their request ids; `wait_for_completion` runs them.

        `use_tqdm` has no effect: queueing takes no time. The others, and what is raised, are as of generate.
        """
        prepared = self._prepared(
            prompts,
            sampling_params,
            lora_request=lora_request,
            priority=priority,
            tokenization_kwargs=tokenization_kwargs,
            mm_processor_kwargs=mm_processor_kwargs,
        )
        return self._offline.add(prepared)

    def wait_for_completion(
        self,
        output_type: type[Any] | tuple[type[Any], ...] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
    ) -> list[Any]:
        """Run all queued requests to their end and return their outputs, in the order in which they were queued.

        Raises TypeError for an output that is not of `output_type`.
        """
        outputs = self._offline.collect(self._offline.request_ids, use_tqdm)
        for output in outputs:
            if output_type is not None and not isinstance(output, output_type):
                raise TypeError(f"request {output.request_id} has a {type(output).__name__}, not {output_type}")
        return outputs

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        priority: int | Sequence[int] | None = None,
        chat_template: str | None = None,
        chat_template_content_format: ContentFormat = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Generate the next message of one conversation or several. Each is a list of {"role": ..., "content": ...}.

        `chat_template`: a jinja template instead of the model's. `chat_template_content_format`: whether it gets
        message contents as text or as a list of parts; auto: detected from the template. `continue_final_message`:
        continue the last message instead of replying to it (add_generation_prompt must then be False). `tools`:
        functions that the template renders; calls are returned in the text, unparsed. The others, and what is raised,
        are as of generate.
        """
        prompts = self.preprocess_chat(
            messages,
            chat_template,
            chat_template_content_format,
            add_generation_prompt,
            continue_final_message,
            tools,
            chat_template_kwargs,
        )
        return self.generate(
            prompts,
            sampling_params,
            use_tqdm=use_tqdm,
            lora_request=lora_request,
            priority=priority,
            tokenization_kwargs=tokenization_kwargs,
            mm_processor_kwargs=mm_processor_kwargs,
        )

    def enqueue_chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        priority: int | Sequence[int] | None = None,
        chat_template: str | None = None,
        chat_template_content_format: ContentFormat = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> list[str]:
        """Queue conversations and return their request ids; `wait_for_completion` runs them. Parameters of chat."""
        prompts = self.preprocess_chat(
            messages,
            chat_template,
            chat_template_content_format,
            add_generation_prompt,
            continue_final_message,
            tools,
            chat_template_kwargs,
        )
        return self.enqueue(
            prompts,
            sampling_params,
            lora_request=lora_request,
            priority=priority,
            tokenization_kwargs=tokenization_kwargs,
            mm_processor_kwargs=mm_processor_kwargs,
        )

    def preprocess_chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        chat_template: str | None = None,
        chat_template_content_format: ContentFormat = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> list[TokensPrompt]:
        """Render conversations and return their prompts, text and token ids. Parameters and errors as of chat."""
        check_extras(mm_processor_kwargs=mm_processor_kwargs)
        checked_tools(tools or ())
        single = bool(messages) and isinstance(messages[0], Mapping)
        conversations: Sequence[Any] = [messages] if single else messages
        return [
            self._render(
                conversation,
                template=self._chat_template if chat_template is None else chat_template,
                content_format=chat_template_content_format,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                must_show_tools=True,
                **(chat_template_kwargs or {}),
            )
            for conversation in conversations
        ]

    def beam_search(
        self,
        prompts: PromptType | Sequence[PromptType],
        params: BeamSearchParams,
        lora_request: LoRARequest | None = None,
        use_tqdm: bool = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """Return the `params.beam_width` best beams of each prompt. `concurrency_limit`: prompts searched at once.

        Raises RequestError, as generate does.
        """
        engine = self.llm_engine
        check_engine(engine.config.model, params, engine.info)
        listed = _listed(prompts)
        check_prompts(listed)
        ids = [self._prepare(prompt, step_params(params), 0).prompt.token_ids for prompt in listed]
        size = concurrency_limit or max(1, len(ids))
        outputs: list[BeamSearchOutput] = []
        for first in range(0, len(ids), size):
            outputs += search_beams(
                lambda batch, step: self.generate(batch, step, use_tqdm=use_tqdm, lora_request=lora_request),
                ids[first : first + size],
                params,
                ends=engine.inputs.end_token_ids,
                max_model_len=engine.info.limits.max_model_len,
                tokenizer=engine.text_or_none,
            )
        return outputs

    @shows_options(PoolingCallOptions, use_tqdm=True)
    def encode(
        self,
        prompts: Prompts,
        pooling_params: Params = None,
        *,
        pooling_task: str | None = None,
        **options: Unpack[PoolingCallOptions],
    ) -> list[RawPoolingOutput]:
        """Return the vectors of each prompt. `pooling_task`: one of the model's tasks; None: its default."""
        return [with_tensor(output) for output in self._encode(prompts, pooling_params, pooling_task, **options)]

    @shows_options(PoolingCallOptions, use_tqdm=True)
    def embed(
        self, prompts: Prompts, *, pooling_params: Params = None, **options: Unpack[PoolingCallOptions]
    ) -> list[EmbeddingRequestOutput]:
        """Return an embedding of each prompt."""
        outputs = self._encode(prompts, pooling_params, "embed", **options)
        return [EmbeddingRequestOutput.from_base(output) for output in outputs]

    @shows_options(PoolingCallOptions, use_tqdm=True)
    def classify(
        self, prompts: Prompts, pooling_params: Params = None, **options: Unpack[PoolingCallOptions]
    ) -> list[ClassificationRequestOutput]:
        """Return the probabilities of the labels, for each prompt."""
        outputs = self._encode(prompts, pooling_params, "classify", **options)
        return [ClassificationRequestOutput.from_base(output) for output in outputs]

    @shows_options(PoolingCallOptions, use_tqdm=True)
    def reward(
        self, prompts: Prompts, /, *, pooling_params: Params = None, **options: Unpack[PoolingCallOptions]
    ) -> list[RawPoolingOutput]:
        """Return a reward model's scores per token, or per prompt if the model has no token scores."""
        tasks = self._pooling_inputs(options.get("lora_request")).pooling.tasks
        task = "token_classify" if "token_classify" in tasks else "classify"
        return [with_tensor(output) for output in self._encode(prompts, pooling_params, task, **options)]

    def score(
        self,
        data_1: Text | Sequence[Text],
        data_2: Text | Sequence[Text],
        /,
        *,
        use_tqdm: Bar = True,
        pooling_params: PoolingParams | None = None,
        lora_request: None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> list[ScoringRequestOutput]:
        """Return the score of each pair: one text with one, one with each of many, or many with as many.

        A cross-encoder reads each pair as one prompt, rendered by `chat_template` if given (messages of roles query and
        document); an embedder's score is the cosine of two vectors.
        """
        inputs = self._pooling_inputs(lora_request)
        pairs = Pairs(inputs, texts_of("data_1", data_1), texts_of("data_2", data_2))
        template = None if chat_template is None else PairTemplate(source=chat_template, keywords={})
        options = ScoreOptions(
            text=_text_options(tokenization_kwargs, truncate_prompt_tokens, pooling_params), template=template
        )
        prompts = pairs.prompts(options)
        params = _with_task(pooling_params or PoolingParams(), pairs.task)
        return pairs.scores(self._pool(prompts, [params] * len(prompts), use_tqdm))

    def get_tokenizer(self) -> HfTokenizer:
        """Return the model's tokenizer, with Hugging Face's interface. Raises ConfigError with skip_tokenizer_init."""
        return self.llm_engine.get_tokenizer()

    def get_default_sampling_params(self) -> SamplingParams:
        """Return SamplingParams with what generation_config.json sets."""
        return self.llm_engine.get_default_sampling_params()

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Drop all cached prefixes. Returns True. See LLMEngine.reset_prefix_cache."""
        return self.llm_engine.reset_prefix_cache(reset_running_requests, reset_connector)

    def get_world_size(self, include_dp: bool = True) -> int:
        """Return the number of devices: of all replicas, or without `include_dp` of one."""
        parallel = self.llm_engine.config.parallel
        one = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
        return one * parallel.data_parallel_size if include_dp else one

    @property
    def model_config(self) -> ModelView:
        """The model's configuration with vLLM's attributes: max_model_len, dtype, hf_config, get_vocab_size()."""
        return self.llm_engine.model_config

    @property
    def supported_tasks(self) -> tuple[str, ...]:
        """What the model can be asked for: "generate", or the tasks of a pooling model."""
        return self.llm_engine.get_supported_tasks()

    def get_metrics(self) -> list[Metric]:
        """Return the engine's metrics. See LLMEngine.get_metrics."""
        return self.llm_engine.get_metrics()

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call a function with each worker, or a worker's method by name. See LLMEngine.collective_rpc."""
        return self.llm_engine.collective_rpc(method, timeout, args, kwargs)

    def apply_model(self, func: Callable[[Any], Any]) -> list[Any]:
        """Call a function with each worker's model. See LLMEngine.apply_model."""
        return self.llm_engine.apply_model(func)

    def start_profile(
        self,
        profile_prefix: str | None = None,
        *,
        delay_iterations: int | None = None,
        max_iterations: int | None = None,
        profiler_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Trace steps from now on. See LLMEngine.start_profile."""
        self.llm_engine.start_profile(
            profile_prefix,
            delay_iterations=delay_iterations,
            max_iterations=max_iterations,
            profiler_kwargs=profiler_kwargs,
        )

    def stop_profile(self) -> str:
        """Write the trace and return its path. See LLMEngine.stop_profile."""
        return self.llm_engine.stop_profile()

    def reset_mm_cache(self) -> None:
        """Return: there is no cache of media."""

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Free the device's memory until wake_up(); generate() raises SleepError meanwhile. Needs
        enable_sleep_mode=True. See LLMEngine.sleep.
        """
        self.llm_engine.sleep(level, mode)

    def wake_up(self, tags: Iterable[str] | None = None) -> None:
        """Restore the memory, or only the named parts of `weights` and `kv_cache`. See LLMEngine.wake_up."""
        self.llm_engine.wake_up(tags)

    def shutdown(self) -> None:
        """Release the device. Idempotent."""
        self.llm_engine.shutdown()

    def _start(self, engine: LLMEngine, chat_template: str | os.PathLike[str] | None = None) -> None:
        self.llm_engine = engine
        self._offline = OfflineRun(engine)
        self._chat_template = None if chat_template is None else templates.read_chat_template(os.fspath(chat_template))
        print(
            f"{engine.info.backend} on {engine.info.device}, ready in\n{engine.info.startup_table()}", file=sys.stderr
        )

    def _prepare(
        self,
        prompt: PromptType,
        params: SamplingParams,
        priority: int,
        text: TextOptions | None = None,
        adapter: Adapter | None = None,
    ) -> PreparedRequest:
        _check_type("sampling_params", params, SamplingParams)
        return self.llm_engine.inputs.prepare(self._new_id(), prompt, params, priority, text=text, adapter=adapter)

    def _prepared(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        *,
        use_tqdm: Bar = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        priority: int | Sequence[int] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> list[PreparedRequest]:
        """Return requests that are checked but not queued. The options are those of BatchOptions."""
        check_extras(mm_processor_kwargs=mm_processor_kwargs)
        listed = _listed(prompts)
        requests = _paired("lora_request", lora_request, len(listed))
        adapters = [self.llm_engine.adapters.adapter(request) for request in requests]
        params = _paired("sampling_params", sampling_params or self.get_default_sampling_params(), len(listed))
        priorities = _paired("priority", 0 if priority is None else priority, len(listed))
        if any(priorities) and self.llm_engine.config.scheduler.policy != "priority":
            raise RequestError("priority", "priority needs scheduling_policy='priority'")
        text = text_options(tokenization_kwargs)
        return [
            replace(self._prepare(prompt, prompt_params, rank, text, adapter), lora_request=request)
            for prompt, prompt_params, rank, adapter, request in zip(listed, params, priorities, adapters, requests)
        ]

    def _render(self, messages: Sequence[Message], **options: Any) -> TokensPrompt:
        tokenizer = self.llm_engine.text
        renderer = self.llm_engine.inputs.templates.render
        documents = options.pop("documents", None)

        def render_text(messages: Sequence[Message], documents: Sequence[Message] | None) -> str:
            return templates.render_chat(tokenizer, messages, renderer=renderer, documents=documents, **options)

        if self.llm_engine.config.model.special_tokens_in_messages == "parse":
            rendered = RenderedChat(render_text(messages, documents))
        else:
            rendered = render_literal(tokenizer, messages, documents, render_text)
        ids = tokenizer.encode_literal(rendered.text, rendered.literal, add_special_tokens=False)
        return {"prompt": rendered.text, "prompt_token_ids": ids}

    def _encode(
        self,
        prompts: Prompts,
        pooling_params: Params,
        task: str | None,
        *,
        use_tqdm: Bar = True,
        lora_request: None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> list[RawPoolingOutput]:
        """Return the outputs of prompts. The options are those of PoolingCallOptions."""
        options = _text_options(tokenization_kwargs, truncate_prompt_tokens, pooling_params)
        inputs = self._pooling_inputs(lora_request)
        listed = _listed(prompts)
        params = _paired("pooling_params", pooling_params or PoolingParams(), len(listed))
        tasked = [_with_task(prompt_params, task) for prompt_params in params]
        return self._pool([inputs.parse(prompt, options) for prompt in listed], tasked, use_tqdm)

    def _pooling_inputs(self, lora_request: object) -> InputProcessor:
        check_extras(lora_request=lora_request)
        inputs = self.llm_engine.inputs
        inputs.check_pools()
        return inputs

    def _pool(
        self, prompts: Sequence[Prompt], params: Sequence[PoolingParams], use_tqdm: Bar
    ) -> list[RawPoolingOutput]:
        inputs = self.llm_engine.inputs
        requests = zip(prompts, params)
        return self._run([inputs.prepare(self._new_id(), prompt, options) for prompt, options in requests], use_tqdm)

    def _new_id(self) -> str:
        self._next_id += 1
        return str(self._next_id - 1)

    def _run(self, prepared: Sequence[PreparedRequest], use_tqdm: bool | Callable[..., Any]) -> list[Any]:
        """Run requests and return their outputs, in order."""
        return self._offline.collect(self._offline.add(prepared), use_tqdm)


# Queued requests run to their end, with a progress bar, and Ctrl-C between steps.


class OfflineRun:
    """Requests that were queued and whose outputs were not collected yet."""

    def __init__(self, engine: LLMEngine) -> None:
        self._engine = engine
        self._running: dict[str, int] = {}  # Request id -> number of sequences.
        self._outputs: dict[str, Output] = {}

    @property
    def request_ids(self) -> list[str]:
        """Ids of the requests whose outputs were not collected, in the order in which they were queued."""
        return sorted({*self._running, *self._outputs}, key=int)

    def add(self, prepared: Sequence[PreparedRequest]) -> list[str]:
        """Queue requests and return their ids. Raises RequestError and queues none if one is refused."""
        added: list[str] = []
        try:
            for request in prepared:
                self._engine.add_prepared(request, RequestOutputKind.FINAL_ONLY)
                added.append(request.request_id)
                self._running[request.request_id] = len(request.children)
        except BaseException:
            self._engine.abort_request(added)
            for request_id in added:
                del self._running[request_id]
            raise
        return added

    def collect(self, request_ids: Sequence[str], use_tqdm: bool | Callable[..., Any]) -> list[Output]:
        """Step the engine until these requests have finished and return their outputs. Ctrl-C ends all requests."""
        engine = self._engine
        missing = {request_id for request_id in request_ids if request_id in self._running}
        try:
            with (
                GenerationBar(sum(self._running[request_id] for request_id in missing), use_tqdm) as bar,
                InterruptBetweenSteps() as interrupt,
            ):
                while missing and engine.has_unfinished_requests():
                    interrupt.check()
                    for output in self._taken(engine.step()):
                        if output.request_id in missing:
                            missing.remove(output.request_id)
                            bar.update(output)
        except BaseException:
            engine.abort_all()
            self._running.clear()
            raise
        return [self._outputs.pop(request_id) for request_id in request_ids]

    def _taken(self, outputs: Iterable[Output]) -> Iterable[Output]:
        for output in outputs:
            if self._running.pop(output.request_id, None) is not None:
                self._outputs[output.request_id] = output
                yield output


class InterruptBetweenSteps:
    """A context in which the first Ctrl-C waits for `check`; a second one interrupts at once.

    Interrupting a step would leave the scheduler without its result. Outside the main thread, where Python delivers no
    signals, this does nothing.
    """

    def __init__(self) -> None:
        self._previous: Any = None
        self._interrupted = False

    def check(self) -> None:
        """Deliver a deferred Ctrl-C: usually KeyboardInterrupt."""
        if self._interrupted:
            self._restore()
            signal.raise_signal(signal.SIGINT)

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGINT, self._defer)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._restore()

    def _defer(self, number: int, frame: FrameType | None) -> None:
        self._interrupted = True
        self._restore()

    def _restore(self) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)
            self._previous = None


class GenerationBar:
    """A tqdm bar over `total` outputs, with tokens per second; `use_tqdm`: False for none, or a callable like tqdm."""

    def __init__(self, total: int, use_tqdm: bool | Callable[..., Any]) -> None:
        self._bar: Any = None
        self._tokens_in = self._tokens_out = 0
        if use_tqdm:
            make = use_tqdm if callable(use_tqdm) else _tqdm
            self._bar = make(total=total, desc="Processed prompts", dynamic_ncols=True, postfix=_speed(0.0, 0.0))

    def update(self, output: RequestOutput | RawPoolingOutput) -> None:
        """Count a finished request."""
        if self._bar is None:
            return
        completions = output.outputs if isinstance(output, RequestOutput) else ()
        count = len(completions) or 1
        read = len(output.prompt_token_ids or ())
        read += len(output.encoder_prompt_token_ids or ()) if isinstance(output, RequestOutput) else 0
        self._tokens_in += read * count
        self._tokens_out += sum(len(completion.token_ids) for completion in completions)
        seconds = max(self._bar.format_dict["elapsed"], 1e-9)
        self._bar.postfix = _speed(self._tokens_in / seconds, self._tokens_out / seconds)
        self._bar.update(count)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()


def _tqdm(**keywords: Any) -> Any:
    from tqdm import tqdm

    return tqdm(**keywords)


def _speed(tokens_in: float, tokens_out: float) -> str:
    return f"est. speed input: {tokens_in:.2f} toks/s, output: {tokens_out:.2f} toks/s"


# Arguments.


def _listed(prompts: Prompts) -> list[PromptType]:
    """Return one prompt or many as a list."""
    single = isinstance(prompts, str | Mapping) or is_token_ids(prompts)
    return [prompts] if single else list(prompts)  # type: ignore[list-item, arg-type]


def _paired(name: str, value: T | Sequence[T], count: int) -> Sequence[T]:
    """Return one value per prompt: a single value repeated, or the given list. Raises RequestError naming `name`."""
    if not isinstance(value, Sequence):
        return [value] * count
    if len(value) != count:
        raise RequestError(name, f"{name} has {len(value)} entries for {count} prompts")
    return value


def _text_options(values: Mapping[str, Any] | None, truncate: int | None, params: Params) -> TextOptions:
    """Return the options of `tokenization_kwargs`, else those given apart or, the same for all, in pooling params."""
    if truncate is None and isinstance(params, PoolingParams):
        truncate = params.truncate_prompt_tokens
    return TextOptions.of(values if truncate is None else {"truncate_prompt_tokens": truncate, **(values or {})})


def _with_task(params: PoolingParams, task: str | None) -> PoolingParams:
    """Return the params with their task set. Raises RequestError if they name another task."""
    _check_type("pooling_params", params, PoolingParams)
    if task is None or params.task == task:
        return params
    if params.task is not None:
        raise RequestError("task", f"pooling_params name task {params.task!r}, but this call needs {task!r}")
    params = params.clone()
    params.task = task
    return params


def _check_type(name: str, value: object, kind: type) -> None:
    if not isinstance(value, kind):
        raise RequestError(name, f"{name} must be {kind.__name__}, not {type(value).__name__}")
