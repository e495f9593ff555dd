"""What LLM does with pooling models: vectors, labels and scores of lists of prompts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from pagoda.common.errors import RequestError
from pagoda.common.pooling_params import PoolingParams
from pagoda.server.offline.llm_runs import OfflineRuns
from pagoda.server.requests.inputs import PromptType, is_token_ids
from pagoda.server.requests.pooling_inputs import PairTemplate, PooledPrompt, PoolingInputs
from pagoda.server.requests.pooling_outputs import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringRequestOutput,
)
from pagoda.server.requests.pooling_text import TextOptions
from pagoda.server.requests.scoring import Pairs, ScoreOptions, Text, texts_of

Prompts = PromptType | Sequence[PromptType]
Params = PoolingParams | Sequence[PoolingParams] | None
Bar = bool | Callable[..., Any]
T = TypeVar("T")


class PoolingMethods(OfflineRuns):
    """A face of LLM. Each method raises RequestError, before anything is run, for what the model cannot do.

    `pooling_params`: one for all prompts, a list paired with them, or None for the model's defaults.
    `tokenization_kwargs`: add_special_tokens, truncate_prompt_tokens, truncation_side.
    """

    def encode(
        self,
        prompts: Prompts,
        pooling_params: Params = None,
        *,
        use_tqdm: Bar = True,
        lora_request: None = None,
        pooling_task: str | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """What the model makes of each prompt, as numbers. `pooling_task`: one of its tasks; None: its usual one."""
        inputs = self._pooling_inputs(lora_request)
        listed = listed_prompts(prompts)
        params = [
            _with_task(each, pooling_task)
            for each in paired("pooling_params", pooling_params or PoolingParams(), len(listed))
        ]
        options = TextOptions.of(tokenization_kwargs)
        return self._pool([inputs.parse(prompt, options) for prompt in listed], params, use_tqdm)

    def embed(
        self,
        prompts: Prompts,
        *,
        use_tqdm: Bar = True,
        pooling_params: Params = None,
        lora_request: None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """A vector for each prompt."""
        found = self.encode(
            prompts,
            pooling_params,
            use_tqdm=use_tqdm,
            lora_request=lora_request,
            pooling_task="embed",
            tokenization_kwargs=tokenization_kwargs,
        )
        return [EmbeddingRequestOutput.from_base(each) for each in found]

    def classify(
        self,
        prompts: Prompts,
        *,
        use_tqdm: Bar = True,
        pooling_params: Params = None,
        lora_request: None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[ClassificationRequestOutput]:
        """How likely each label is, for each prompt."""
        found = self.encode(
            prompts,
            pooling_params,
            use_tqdm=use_tqdm,
            lora_request=lora_request,
            pooling_task="classify",
            tokenization_kwargs=tokenization_kwargs,
        )
        return [ClassificationRequestOutput.from_base(each) for each in found]

    def reward(
        self,
        prompts: Prompts,
        /,
        *,
        pooling_params: Params = None,
        use_tqdm: Bar = True,
        lora_request: None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """A reward model's numbers for each token of each prompt; for the whole prompt where it has no others."""
        tasks = self._pooling_inputs(lora_request).pooling.tasks
        return self.encode(
            prompts,
            pooling_params,
            use_tqdm=use_tqdm,
            pooling_task="token_classify" if "token_classify" in tasks else "classify",
            tokenization_kwargs=tokenization_kwargs,
        )

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
        """How well texts go together: one with one, one with each of many, or many with as many.

        A cross-encoder reads each pair as one prompt, made by `chat_template` when there is one (messages of roles
        query and document); an embedder's score is the cosine of two vectors.
        """
        inputs = self._pooling_inputs(lora_request)
        pairs = Pairs(inputs, texts_of("data_1", data_1), texts_of("data_2", data_2))
        template = None if chat_template is None else PairTemplate(source=chat_template, keywords={})
        options = ScoreOptions(text=TextOptions.of(tokenization_kwargs), template=template)
        prompts = pairs.prompts(options)
        params = _with_task(pooling_params or PoolingParams(), pairs.task)
        return pairs.scores(self._pool(prompts, [params] * len(prompts), use_tqdm))

    def _pooling_inputs(self, lora_request: object) -> PoolingInputs:
        if lora_request is not None:
            raise RequestError("lora_request", "lora_request is not supported: adapters are not in this version")
        return self.llm_engine.pooling_inputs

    def _pool(
        self, prompts: Sequence[PooledPrompt], params: Sequence[PoolingParams], use_tqdm: Bar
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        inputs = self.llm_engine.pooling_inputs
        return self._run([inputs.prepare(self._new_id(), *each) for each in zip(prompts, params)], use_tqdm)


def listed_prompts(prompts: Prompts) -> list[PromptType]:
    """One prompt or many, as a list."""
    single = isinstance(prompts, str | Mapping) or is_token_ids(prompts)
    return [prompts] if single else list(prompts)  # type: ignore[list-item, arg-type]


def paired(name: str, value: T | Sequence[T], count: int) -> Sequence[T]:
    """One value per prompt, of `count`: the same for all, or their own. Raises RequestError naming `name`."""
    if not isinstance(value, Sequence):
        return [value] * count
    if len(value) != count:
        raise RequestError(name, f"{name} has {len(value)} entries for {count} prompts")
    return value


def _with_task(params: PoolingParams, task: str | None) -> PoolingParams:
    """Params for a task, which may be theirs already."""
    if not isinstance(params, PoolingParams):
        raise RequestError("pooling_params", f"pooling_params must be PoolingParams, not {type(params).__name__}")
    if task is None or params.task == task:
        return params
    if params.task is not None:
        raise RequestError("task", f"pooling_params ask for {params.task!r}, but {task!r} is wanted here")
    own = params.clone()
    own.task = task
    return own
