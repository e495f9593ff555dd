"""Reports the requests of an LLMEngine to Prometheus metrics of its own."""

from __future__ import annotations

import time
from collections.abc import Iterable

from pagoda.common.engine.messages import StepOutputs
from pagoda.common.observe.metrics import FINISH_REASONS, FinishedRequest, FinishedSequence, Metrics
from pagoda.common.pooling_params import PoolingParams
from pagoda.server.metrics_reader import Metric, snapshot
from pagoda.server.outputs import AnswerMetrics, RawPoolingOutput, RequestOutput
from pagoda.server.processing.inputs import PreparedRequest


class EngineMetrics:
    """The metrics of one LLMEngine."""

    def __init__(self, model_name: str) -> None:
        self._metrics = Metrics(model_name)
        self._requests: dict[str, PreparedRequest] = {}
        self._started: set[str] = set()

    def add(self, prepared: PreparedRequest) -> None:
        """Follow a request that was queued."""
        self._requests[prepared.request_id] = prepared

    def on_step(self, step: StepOutputs, outputs: Iterable[RequestOutput | RawPoolingOutput]) -> None:
        """Record a step and the outputs made of it."""
        self._metrics.on_step(step)
        self.on_outputs(outputs)

    def on_outputs(self, outputs: Iterable[RequestOutput | RawPoolingOutput]) -> None:
        """Record outputs, of which the finished ones end their requests."""
        for output in outputs:
            if isinstance(output, RequestOutput):
                self._generated(output)
            else:
                self._pooled(output)

    def snapshot(self) -> list[Metric]:
        """Return the present values."""
        return snapshot(self._metrics.registry)

    def _generated(self, output: RequestOutput) -> None:
        prepared = self._requests.get(output.request_id)
        times = output.metrics
        if prepared is None or times is None:
            return
        tokens = len(output.prompt_token_ids or ())
        if times.first_token_ts and output.request_id not in self._started:
            self._started.add(output.request_id)
            self._metrics.on_first_token(
                arrival=prepared.arrival,
                first_token=times.first_token_ts,
                prompt_tokens=tokens,
                cached_tokens=output.num_cached_tokens or 0,
            )
        if not output.finished or isinstance(prepared.params, PoolingParams):
            return
        del self._requests[output.request_id]
        self._started.discard(output.request_id)
        reason = next((each.finish_reason for each in output.outputs if each.finish_reason), "abort")
        self._metrics.on_finish(
            FinishedRequest(
                finish_reason=reason if reason in FINISH_REASONS else "error",
                arrival=prepared.arrival,
                queued=times.queued_ts,
                prompt_tokens=tokens,
                n=prepared.params.n,
                max_tokens=prepared.params.max_tokens,
                sequences=tuple(map(finished_sequence, times.answers)),
            )
        )

    def _pooled(self, output: RawPoolingOutput) -> None:
        prepared = self._requests.pop(output.request_id, None)
        if prepared is not None:
            self._metrics.on_pooled(
                "stop",
                arrival=prepared.arrival,
                scheduled=output.scheduled_ts,
                finished=output.finished_ts or time.monotonic(),
                prompt_tokens=len(output.prompt_token_ids),
            )


def finished_sequence(times: AnswerMetrics) -> FinishedSequence:
    """Return the timings of one of n sequences as the metrics take them."""
    return FinishedSequence(
        is_complete=times.is_complete,
        scheduled=times.scheduled_ts,
        first_token=times.first_token_ts,
        last_token=times.last_token_ts,
        cached_tokens=times.num_cached_tokens,
        generation_tokens=times.num_generation_tokens,
        preemptions=times.num_preemptions,
    )
