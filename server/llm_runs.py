"""Offline runs: all requests to their ends, with a progress bar; Ctrl-C ends them."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Sequence
from types import FrameType, TracebackType
from typing import Any, Self

from pagoda.common.sampling_params import RequestOutputKind
from pagoda.server.llm_engine import LLMEngine
from pagoda.server.outputs import RawPoolingOutput, RequestOutput
from pagoda.server.processing.inputs import PreparedRequest


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
        self._tokens_in += len(output.prompt_token_ids or ()) * count
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


class OfflineRuns:
    """An engine and a counter of request ids."""

    llm_engine: LLMEngine
    _next_id = 0

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
