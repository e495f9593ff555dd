"""LLM: offline inference. A list of prompts in, a list of outputs out."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType, TracebackType
from typing import Any, Literal, Self, TypeVar

from pagoda.common.beam_search import Beam, BeamSearch, BeamSearchParams
from pagoda.common.errors import RequestError
from pagoda.common.pooling_params import PoolingParams
from pagoda.common.sampling_params import RequestOutputKind, SamplingParams
from pagoda.common.text import chat_template as templates
from pagoda.common.text.hf_tokenizer import HfTokenizer
from pagoda.common.text.tokenizer import Tokenizer
from pagoda.server.chat_prompt import checked_tools
from pagoda.server.llm_engine import LLMEngine
from pagoda.server.outputs import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    RawPoolingOutput,
    RequestOutput,
    ScoringRequestOutput,
)
from pagoda.server.processing.beams import candidates_of, check_engine, check_prompts, step_params
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

Prompts = PromptType | Sequence[PromptType]
Params = PoolingParams | Sequence[PoolingParams] | None
Bar = bool | Callable[..., Any]
T = TypeVar("T")
Message = Mapping[str, Any]


class LLM:
    """A model for offline use: `LLM(model="...").generate(["Hello"], SamplingParams(max_tokens=32))`.

    Keywords are those of EngineArgs. Raises ConfigError, ModelError or WeightError when the model cannot be served.

    The methods for pooling models, `encode` to `score`, raise RequestError before any prompt runs. Their
    `pooling_params`: one for all prompts, a list paired with them, or None for the model's defaults; their
    `tokenization_kwargs`: add_special_tokens, truncate_prompt_tokens, truncation_side.
    """

    _next_id = 0

    def __init__(self, model: str | os.PathLike[str] | None = None, **engine_args: Any) -> None:
        self._start(LLMEngine(EngineArgs(model, **engine_args).create_engine_config()))

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

    def generate(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: None = None,
        priority: int | Sequence[int] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Generate for each prompt and return the outputs in order.

        `prompts`: one or a list of texts, token id lists, {"prompt": ...}, {"prompt_token_ids": ...} or, with
        enable_prompt_embeds, {"prompt_embeds": tensor [tokens, width]}; of an encoder-decoder model what the encoder
        reads, or {"encoder_prompt": ..., "decoder_prompt": ...}. One set of params applies to all prompts, a
        list is paired with them; None: the model's defaults. `use_tqdm`: a bar on stderr, or a callable like tqdm.
        `priority`: smaller runs first, with scheduling_policy="priority". `tokenization_kwargs`: as for pooling.

        Raises RequestError for the first prompt that cannot be served, before any runs. Ctrl-C ends all of them.
        """
        check_extras(lora_request=lora_request, mm_processor_kwargs=mm_processor_kwargs)
        listed = _listed(prompts)
        params = _paired("sampling_params", sampling_params or self.get_default_sampling_params(), len(listed))
        priorities = _paired("priority", 0 if priority is None else priority, len(listed))
        if any(priorities) and self.llm_engine.config.scheduler.policy != "priority":
            raise RequestError("priority", "priority needs scheduling_policy='priority'")
        text = text_options(tokenization_kwargs)
        prepared = [self._prepare(*each, text) for each in zip(listed, params, priorities)]
        return self._run(prepared, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: None = None,
        priority: int | Sequence[int] | None = None,
        chat_template: str | None = None,
        chat_template_content_format: Literal["auto", "openai", "string"] = "auto",
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
        checked_tools(tools or ())
        single = bool(messages) and isinstance(messages[0], Mapping)
        conversations: Sequence[Any] = [messages] if single else messages
        prompts = [
            self._render(
                each,
                template=chat_template,
                content_format=chat_template_content_format,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                must_show_tools=True,
                **(chat_template_kwargs or {}),
            )
            for each in conversations
        ]
        return self.generate(
            prompts,
            sampling_params,
            use_tqdm=use_tqdm,
            lora_request=lora_request,
            priority=priority,
            tokenization_kwargs=tokenization_kwargs,
            mm_processor_kwargs=mm_processor_kwargs,
        )

    def beam_search(
        self,
        prompts: PromptType | Sequence[PromptType],
        params: BeamSearchParams,
        lora_request: None = None,
        use_tqdm: bool = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """Return the `params.beam_width` best beams of each prompt. `concurrency_limit`: prompts searched at once.

        Raises RequestError, as generate does.
        """
        check_extras(lora_request=lora_request)
        engine = self.llm_engine
        check_engine(engine.config.model, params, engine.info)
        listed = _listed(prompts)
        check_prompts(listed)
        ids = [self._prepare(prompt, step_params(params), 0).prompt.token_ids for prompt in listed]
        size = concurrency_limit or max(1, len(ids))
        outputs: list[BeamSearchOutput] = []
        for first in range(0, len(ids), size):
            outputs += _search(
                lambda batch, step: self.generate(batch, step, use_tqdm=use_tqdm),
                ids[first : first + size],
                params,
                ends=engine.inputs.end_token_ids,
                max_model_len=engine.info.limits.max_model_len,
                tokenizer=engine.tokenizer,
            )
        return outputs

    def encode(
        self,
        prompts: Prompts,
        pooling_params: Params = None,
        *,
        use_tqdm: Bar = True,
        lora_request: None = None,
        pooling_task: str | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RawPoolingOutput]:
        """Return the vectors of each prompt. `pooling_task`: one of the model's tasks; None: its default."""
        return self._encode(prompts, pooling_params, pooling_task, use_tqdm, lora_request, tokenization_kwargs)

    def embed(
        self,
        prompts: Prompts,
        *,
        use_tqdm: Bar = True,
        pooling_params: Params = None,
        lora_request: None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """Return an embedding of each prompt."""
        outputs = self._encode(prompts, pooling_params, "embed", use_tqdm, lora_request, tokenization_kwargs)
        return [EmbeddingRequestOutput.from_base(each) for each in outputs]

    def classify(
        self,
        prompts: Prompts,
        *,
        use_tqdm: Bar = True,
        pooling_params: Params = None,
        lora_request: None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[ClassificationRequestOutput]:
        """Return the probabilities of the labels, for each prompt."""
        outputs = self._encode(prompts, pooling_params, "classify", use_tqdm, lora_request, tokenization_kwargs)
        return [ClassificationRequestOutput.from_base(each) for each in outputs]

    def reward(
        self,
        prompts: Prompts,
        /,
        *,
        pooling_params: Params = None,
        use_tqdm: Bar = True,
        lora_request: None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RawPoolingOutput]:
        """Return a reward model's scores per token, or per prompt if the model has no token scores."""
        tasks = self._pooling_inputs(lora_request).pooling.tasks
        task = "token_classify" if "token_classify" in tasks else "classify"
        return self._encode(prompts, pooling_params, task, use_tqdm, lora_request, tokenization_kwargs)

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
    ) -> list[ScoringRequestOutput]:
        """Return the score of each pair: one text with one, one with each of many, or many with as many.

        A cross-encoder reads each pair as one prompt, rendered by `chat_template` if given (messages of roles query and
        document); an embedder's score is the cosine of two vectors.
        """
        inputs = self._pooling_inputs(lora_request)
        pairs = Pairs(inputs, texts_of("data_1", data_1), texts_of("data_2", data_2))
        template = None if chat_template is None else PairTemplate(source=chat_template, keywords={})
        options = ScoreOptions(text=TextOptions.of(tokenization_kwargs), template=template)
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

    def _start(self, engine: LLMEngine) -> None:
        self.llm_engine = engine
        print(
            f"{engine.info.backend} on {engine.info.device}, ready in\n{engine.info.startup_table()}", file=sys.stderr
        )

    def _prepare(
        self, prompt: PromptType, params: SamplingParams, priority: int, text: TextOptions | None = None
    ) -> PreparedRequest:
        _check_type("sampling_params", params, SamplingParams)
        return self.llm_engine.inputs.prepare(self._new_id(), prompt, params, priority, text=text)

    def _render(self, messages: Sequence[Message], **options: Any) -> dict[str, Any]:
        tokenizer = self.llm_engine.text
        text = templates.render_chat(tokenizer, messages, **options)
        return {"prompt": text, "prompt_token_ids": tokenizer.encode(text, add_special_tokens=False)}

    def _encode(
        self,
        prompts: Prompts,
        pooling_params: Params,
        task: str | None,
        use_tqdm: Bar,
        lora_request: None,
        tokenization_kwargs: Mapping[str, Any] | None,
    ) -> list[RawPoolingOutput]:
        inputs = self._pooling_inputs(lora_request)
        listed = _listed(prompts)
        params = _paired("pooling_params", pooling_params or PoolingParams(), len(listed))
        tasked = [_with_task(each, task) for each in params]
        options = TextOptions.of(tokenization_kwargs)
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
        return self._run([inputs.prepare(self._new_id(), *each) for each in zip(prompts, params)], use_tqdm)

    def _new_id(self) -> str:
        self._next_id += 1
        return str(self._next_id - 1)

    def _run(self, prepared: Sequence[PreparedRequest], use_tqdm: bool | Callable[..., Any]) -> list[Any]:
        """Run requests and return their outputs, in order."""
        engine = self.llm_engine
        outputs: dict[str, RequestOutput | RawPoolingOutput] = {}
        try:
            for request in prepared:
                engine.add_prepared(request, RequestOutputKind.FINAL_ONLY)
            total = sum(len(request.children) for request in prepared)
            with GenerationBar(total, use_tqdm) as bar, InterruptBetweenSteps() as interrupt:
                while engine.has_unfinished_requests():
                    interrupt.check()
                    for output in engine.step():
                        outputs[output.request_id] = output
                        bar.update(output)
        except BaseException:
            engine.abort_all()
            raise
        return [outputs[request.request_id] for request in prepared]


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


# Runs to the end of all requests: a progress bar, and Ctrl-C between two steps.


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

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
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

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.close()


def _tqdm(**keywords: Any) -> Any:
    from tqdm import tqdm

    return tqdm(**keywords)


def _speed(tokens_in: float, tokens_out: float) -> str:
    return f"est. speed input: {tokens_in:.2f} toks/s, output: {tokens_out:.2f} toks/s"


# Beam search.

Generate = Callable[[list[dict[str, Any]], SamplingParams], list[RequestOutput]]
"""Generates for token prompts and returns the outputs in order."""


@dataclass(slots=True)
class BeamSearchSequence:
    """One beam. `tokens` and `text` include the prompt."""

    tokens: list[int]
    cum_logprob: float
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    lora_request: None = None


@dataclass(slots=True)
class BeamSearchOutput:
    """The beams of one prompt, best first."""

    sequences: list[BeamSearchSequence] = field(default_factory=list)


def _search(
    generate: Generate,
    prompts: Sequence[list[int]],
    params: BeamSearchParams,
    *,
    ends: frozenset[int],
    max_model_len: int,
    tokenizer: Tokenizer | None,
) -> list[BeamSearchOutput]:
    """Search all prompts (token ids) in lockstep, so that each batch has the live beams of all of them."""
    searches = [BeamSearch(params, ends, max_model_len - len(prompt)) for prompt in prompts]
    sampling = step_params(params)
    while live := [index for index, each in enumerate(searches) if not each.finished]:
        beams = [(index, beam) for index in live for beam in searches[index].live]
        outputs = generate([{"prompt_token_ids": [*prompts[i], *beam.token_ids]} for i, beam in beams], sampling)
        for index in live:
            searches[index].take([candidates_of(out) for out, (owner, _) in zip(outputs, beams) if owner == index])
    return [
        BeamSearchOutput([_sequence(prompt, beam, params, tokenizer) for beam in each.best()])
        for prompt, each in zip(prompts, searches)
    ]


def _sequence(
    prompt: list[int], beam: Beam, params: BeamSearchParams, tokenizer: Tokenizer | None
) -> BeamSearchSequence:
    keeps_end = params.include_stop_str_in_output or not beam.ended
    tokens = [*prompt, *(beam.token_ids if keeps_end else beam.token_ids[:-1])]
    return BeamSearchSequence(
        tokens=tokens,
        cum_logprob=beam.logprob,
        text=None if tokenizer is None else tokenizer.decode(tokens),
        finish_reason="stop" if beam.ended else "length",
    )
