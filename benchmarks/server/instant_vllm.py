"""A vLLM executor that answers at once; the server, its scheduler and its engine process are vLLM's own.

For `vllm serve FOLDER --distributed-executor-backend instant_vllm.InstantExecutor` with this folder on PYTHONPATH.
It lives in the engine's process, as the executor of a single GPU does, so that no other process is in the way.
"""

from __future__ import annotations

from concurrent.futures import Future

import torch
from instant_answer import Pace, tokens
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.executor import Executor
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.worker.worker_base import CompilationTimes

CACHE_BYTES = 8 << 30
"""Pretended: none of it is allocated."""


class InstantExecutor(Executor):
    """Runs no model."""

    def _init_executor(self) -> None:
        self._tokens = tokens(self.model_config.model)
        self._pace = Pace()
        self._prompts: dict[str, int] = {}  # tokens of each running request's prompt
        model = self.model_config
        spec = FullAttentionSpec(
            block_size=self.cache_config.block_size,
            num_kv_heads=model.get_num_kv_heads(self.parallel_config),
            head_size=model.get_head_size(),
            dtype=torch.bfloat16,
        )
        layers = model.get_num_layers(self.parallel_config)
        self._answers = {
            "determine_available_memory": CACHE_BYTES,
            "get_kv_cache_spec": {f"layers.{index}": spec for index in range(layers)},
            "get_supported_kv_cache_layouts": ["NHD"],
            "get_supported_tasks": ("generate",),
            "compile_or_warm_up_model": CompilationTimes(language_model=0.0, encoder=0.0),
        }

    def collective_rpc(self, method, timeout=None, args=(), kwargs=None, non_block=False) -> list | Future:
        """What the one worker would answer."""
        return _done([self._answers.get(method)]) if non_block else [self._answers.get(method)]

    def execute_model(self, scheduler_output: SchedulerOutput, non_block: bool = False) -> ModelRunnerOutput | Future:
        """The token of each sequence's place, where its prompt is complete."""
        self._pace.wait()
        for ended in scheduler_output.finished_req_ids:
            self._prompts.pop(ended, None)
        new, cached = scheduler_output.scheduled_new_reqs, scheduler_output.scheduled_cached_reqs
        computed = dict(zip(cached.req_ids, cached.num_computed_tokens))
        for request in new:
            self._prompts[request.req_id] = len(request.prompt_token_ids)
            computed[request.req_id] = request.num_computed_tokens
        words, count, prompts = self._tokens, len(self._tokens), self._prompts
        scheduled = scheduler_output.num_scheduled_tokens
        ids = list(scheduled)
        ends = [computed[each] + scheduled[each] for each in ids]
        output = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={each: index for index, each in enumerate(ids)},
            sampled_token_ids=[[words[end % count]] if end >= prompts[each] else [] for each, end in zip(ids, ends)],
        )
        return _done(output) if non_block else output

    def check_health(self) -> None:
        """It is well."""


def _done(value: object) -> Future:
    future: Future = Future()
    future.set_result(value)
    return future
