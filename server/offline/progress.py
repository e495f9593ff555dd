"""The progress bar of offline generation: prompts done, and tokens per second in and out."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from pagoda.server.outputs import RequestOutput
from pagoda.server.requests.pooling_outputs import PoolingRequestOutput


class GenerationBar:
    """A tqdm bar over `total` answers; `use_tqdm` False: none, a callable: makes the bar instead of tqdm."""

    def __init__(self, total: int, use_tqdm: bool | Callable[..., Any]) -> None:
        self._bar: Any = None
        self._tokens_in = self._tokens_out = 0
        if use_tqdm:
            make = use_tqdm if callable(use_tqdm) else _tqdm
            self._bar = make(total=total, desc="Processed prompts", dynamic_ncols=True, postfix=_speed(0.0, 0.0))

    def update(self, output: RequestOutput | PoolingRequestOutput[Any]) -> None:
        """Count a finished request."""
        if self._bar is None:
            return
        answers = output.outputs if isinstance(output, RequestOutput) else ()
        count = len(answers) or 1
        self._tokens_in += len(output.prompt_token_ids or ()) * count
        self._tokens_out += sum(len(answer.token_ids) for answer in answers)
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
