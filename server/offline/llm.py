"""LLM: the offline face. A list of prompts in, a list of answers out.

Knows lists and progress bars; the engine below it knows the rest.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Self

from pagoda.common.beam_search import BeamSearchParams
from pagoda.common.errors import RequestError
from pagoda.common.sampling_params import SamplingParams
from pagoda.common.text import chat_template as templates
from pagoda.common.text.tokenizer import Tokenizer
from pagoda.server.conversation.tools import checked_tools
from pagoda.server.offline.beams import BeamSearchOutput, search
from pagoda.server.offline.llm_engine import LLMEngine
from pagoda.server.offline.llm_pooling import PoolingMethods, listed_prompts, paired
from pagoda.server.outputs import RequestOutput
from pagoda.server.requests.beams import check_engine, check_prompts, step_params
from pagoda.server.requests.inputs import PreparedRequest, PromptType
from pagoda.server.settings.args import EngineArgs

Message = Mapping[str, Any]


class LLM(PoolingMethods):
    """A model for offline use: `LLM(model="...").generate(["Hello"], SamplingParams(max_tokens=32))`.

    Keywords are those of EngineArgs. Raises ConfigError, ModelError or WeightError when the model cannot be served.
    """

    def __init__(self, model: str | os.PathLike[str] | None = None, **engine_args: Any) -> None:
        self._start(LLMEngine(EngineArgs(model, **engine_args).create_engine_config()))

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> Self:
        """The model that the arguments describe."""
        return cls.from_engine(LLMEngine.from_engine_args(engine_args))

    @classmethod
    def from_engine(cls, engine: LLMEngine) -> Self:
        """A face for an engine that runs already."""
        llm = cls.__new__(cls)
        llm._start(engine)
        return llm

    def _start(self, engine: LLMEngine) -> None:
        self.llm_engine = engine
        print(
            f"{engine.info.backend} on {engine.info.device}, ready in\n{engine.info.startup_table()}", file=sys.stderr
        )

    def generate(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: None = None,
        priority: int | Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Continue each prompt; the answers come in the prompts' order.

        `prompts`: one or a list of texts, token id lists, {"prompt": ...}, {"prompt_token_ids": ...} or, with
        enable_prompt_embeds, {"prompt_embeds": tensor [tokens, width]}. One set of params serves all prompts, a list is
        paired with them; None takes the model's defaults. `use_tqdm`: a bar on stderr, or a callable that makes one.
        `priority`: smaller runs first, with scheduling_policy="priority".

        Raises RequestError for the first prompt that cannot be served, before any is run. Ctrl-C ends all of them.
        """
        if lora_request is not None:
            raise RequestError("lora_request", "lora_request is not supported: adapters are not in this version")
        listed = listed_prompts(prompts)
        params = paired("sampling_params", sampling_params or self.get_default_sampling_params(), len(listed))
        priorities = paired("priority", 0 if priority is None else priority, len(listed))
        if any(priorities) and self.llm_engine.config.scheduler.policy != "priority":
            raise RequestError("priority", "priority needs scheduling_policy='priority'")
        prepared = [self._prepare(*each) for each in zip(listed, params, priorities)]
        return self._run(prepared, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: None = None,
        priority: int | Sequence[int] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or a list of them. Each is a list of {"role": ..., "content": ...}.

        `chat_template`: a jinja template instead of the model's. `continue_final_message`: go on with the last message
        instead of answering it (add_generation_prompt must then be False). `tools`: functions that the template shows
        to the model; its calls are in the text, as it writes them. Raises RequestError, as generate does.
        """
        checked_tools(tools or ())
        one = bool(messages) and isinstance(messages[0], Mapping)
        conversations: Sequence[Any] = [messages] if one else messages
        prompts = [
            self._render(
                each,
                template=chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                must_show_tools=True,
                **(chat_template_kwargs or {}),
            )
            for each in conversations
        ]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm, lora_request=lora_request, priority=priority)

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises ConfigError with skip_tokenizer_init."""
        return self.llm_engine.get_tokenizer()

    def get_default_sampling_params(self) -> SamplingParams:
        """What generation_config.json sets, on top of SamplingParams' own defaults."""
        return self.llm_engine.get_default_sampling_params()

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes. Returns True."""
        return self.llm_engine.reset_prefix_cache()

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Give the device's memory back until wake_up(); generate() raises SleepError meanwhile. Needs
        enable_sleep_mode=True. See LLMEngine.sleep.
        """
        self.llm_engine.sleep(level, mode)

    def wake_up(self, tags: Iterable[str] | None = None) -> None:
        """Have the memory again, or only the parts named of `weights` and `kv_cache`. See LLMEngine.wake_up."""
        self.llm_engine.wake_up(tags)

    def shutdown(self) -> None:
        """Release the device. Idempotent."""
        self.llm_engine.shutdown()

    def beam_search(
        self,
        prompts: PromptType | Sequence[PromptType],
        params: BeamSearchParams,
        lora_request: None = None,
        use_tqdm: bool = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """The `params.beam_width` best answers to each prompt. `concurrency_limit`: prompts searched for at once.

        Raises RequestError, as generate does.
        """
        if lora_request is not None:
            raise RequestError("lora_request", "lora_request is not supported: adapters are not in this version")
        engine = self.llm_engine
        check_engine(engine.config.model, params, engine.info.vocab_size)
        listed = listed_prompts(prompts)
        check_prompts(listed)
        ids = [self._prepare(prompt, step_params(params), 0).prompt.token_ids for prompt in listed]
        size = concurrency_limit or max(1, len(ids))
        found: list[BeamSearchOutput] = []
        for first in range(0, len(ids), size):
            found += search(
                lambda asked, step: self.generate(asked, step, use_tqdm=use_tqdm),
                ids[first : first + size],
                params,
                ends=engine.inputs.end_token_ids,
                max_model_len=engine.info.max_model_len,
                tokenizer=engine.tokenizer,
            )
        return found

    def _prepare(self, prompt: PromptType, params: SamplingParams, priority: int) -> PreparedRequest:
        if not isinstance(params, SamplingParams):
            raise RequestError(
                "sampling_params", f"sampling_params must be SamplingParams, not {type(params).__name__}"
            )
        return self.llm_engine.inputs.prepare(self._new_id(), prompt, params, priority)

    def _render(self, messages: Sequence[Message], **options: Any) -> dict[str, Any]:
        tokenizer = self.get_tokenizer()
        text = templates.render_chat(tokenizer, messages, **options)
        return {"prompt": text, "prompt_token_ids": tokenizer.encode(text, add_special_tokens=False)}
