"""Requests of an LLM run to their end: what is queued, what has finished, a progress bar, and Ctrl-C between steps."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterable, Sequence
from types import FrameType, TracebackType
from typing import Any, Self

from pagoda.common.sampling_params import RequestOutputKind
from pagoda.server.llm_engine import LLMEngine
from pagoda.server.outputs import RawPoolingOutput, RequestOutput
from pagoda.server.processing.inputs import PreparedRequest

Output = RequestOutput | RawPoolingOutput


class OfflineRun:
    """Requests that were queued and whose outputs were not collected yet."""

    def __init__(self, engine: LLMEngine) -> None:
        self._engine = engine
        self._running: dict[str, int] = {}  # request id -> sequences
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
        missing = {each for each in request_ids if each in self._running}
        try:
            with (
                GenerationBar(sum(self._running[each] for each in missing), use_tqdm) as bar,
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
        return [self._outputs.pop(each) for each in request_ids]

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
