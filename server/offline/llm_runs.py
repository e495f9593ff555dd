"""How offline faces run requests: all of them, to their ends, with a bar; Ctrl-C ends them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pagoda.common.sampling_params import RequestOutputKind
from pagoda.server.offline.interrupt import InterruptBetweenSteps
from pagoda.server.offline.llm_engine import LLMEngine
from pagoda.server.offline.progress import GenerationBar
from pagoda.server.outputs import RequestOutput
from pagoda.server.requests.inputs import PreparedRequest
from pagoda.server.requests.pooling_inputs import PreparedPooling
from pagoda.server.requests.pooling_outputs import PoolingRequestOutput


class OfflineRuns:
    """An engine, and numbers for its requests."""

    llm_engine: LLMEngine
    _next_id = 0

    def _new_id(self) -> str:
        self._next_id += 1
        return str(self._next_id - 1)

    def _run(
        self, prepared: Sequence[PreparedRequest | PreparedPooling], use_tqdm: bool | Callable[..., Any]
    ) -> list[Any]:
        """The outputs of requests, in their order."""
        engine = self.llm_engine
        answers: dict[str, RequestOutput | PoolingRequestOutput[Any]] = {}
        try:
            for request in prepared:
                if isinstance(request, PreparedPooling):
                    engine.add_pooling(request)
                else:
                    engine.add_prepared(request, RequestOutputKind.FINAL_ONLY)
            total = sum(len(request.children) for request in prepared)
            with GenerationBar(total, use_tqdm) as bar, InterruptBetweenSteps() as interrupt:
                while engine.has_unfinished_requests():
                    interrupt.check()
                    for output in engine.step():
                        answers[output.request_id] = output
                        bar.update(output)
        except BaseException:
            engine.abort_all()
            raise
        return [answers[request.request_id] for request in prepared]
