"""What does quantisation cost in quality? Perplexity, and KL divergence from the unquantised model.

usage: python quality.py MODEL [--schemes int8 int4 fp8 FOLDER ...] [--backend reference] [--dtype bfloat16]
       [--tokens 2048] [--window 256] [--text FILE] [--output FILE]

A scheme is a value of --quantization, or the path of a quantised checkpoint of the same model (it holds a `/`). Prints
a table, and writes one JSON object with `--output`.

The text: paragraphs of this project's guides (benchmarks/data/guides.txt), which no model was trained on; windows of
`--window` tokens, each without the ones before. The engine's backend executes one step per window and returns the
log-probability of every word of the vocabulary at every position, so the divergence is exact, not that of the most
likely words. Per position it is the sum over the vocabulary of p (log p - log q), p of the unquantised model on the
same backend in float32; the mean and the 99th percentile are reported. The rows, `none` included, are in --dtype.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from pagoda.benchmarks.readme import machine
from pagoda.common.backend import Backend
from pagoda.common.engine.kv_cache.spec import KvLayout
from pagoda.common.engine.sampling.rules import SamplingRules
from pagoda.common.engine.steps.contract import RowStart, StepPlan
from pagoda.server.settings.flags import EngineArgs
from pagoda.server.settings.resolve import resolve
from pagoda.server.settings.tokenizer import open_tokenizer
from pagoda.server.startup.engine import build_engine

Floats = npt.NDArray[np.float32]

TEXT = Path(__file__).parent / "data" / "guides.txt"
BASE, NONE = "none, float32", "none"
EVERYTHING = SamplingRules(temperature=0.0, prompt_logprobs=-1)


@dataclass(frozen=True)
class Quality:
    """What a scheme gives on the text."""

    scheme: str
    perplexity: float
    loss_percent: float  # of perplexity, against the unquantised model in float32
    kl_mean: float  # nats per token
    kl_99: float
    same_best: float  # share of positions where the most likely word is the same


class Scorer:
    """A loaded engine's backend, which scores windows of tokens."""

    def __init__(self, model: str, quantization: str | None, backend: str, dtype: str, window: int) -> None:
        sizes = {"max_model_len": window, "max_num_batched_tokens": window, "max_num_seqs": 1, "max_logprobs": -1}
        args = EngineArgs(model, backend=backend, dtype=dtype, quantization=quantization, **sizes)
        config = args.create_engine_config()
        self._layout: KvLayout = resolve(config, "llm", weights=True).layout
        self._engine = build_engine(config, "llm")
        self._step, self._window = 0, window

    def close(self) -> None:
        self._engine.backend.close()

    def logprobs(self, token_ids: Sequence[int]) -> Floats:
        """Return the log-probabilities [n - 1, V] of what follows each token but the last."""
        backend = cast(Backend, self._engine.backend)
        pages = -(-self._window // self._layout.block_size)
        ids = np.array(token_ids, np.int32)
        groups = len(self._layout.groups)
        tables = 1 + np.arange(pages * groups, dtype=np.int32).reshape(groups, 1, pages)
        plan = StepPlan(
            step=self._step,
            starts=(RowStart(0, ids, len(ids), EVERYTHING),),
            rows=np.zeros(1, np.int32),
            query_start=np.array([0, len(ids)], np.int32),
            context=np.zeros(1, np.int32),
            token_ids=ids,
            block_tables=tuple(tables),
            samples=np.ones(1, np.bool_),
        )
        self._step += 1
        scores = backend.execute(plan).result().prompt_logprobs[0]
        whole = np.empty((len(ids) - 1, scores.token_ids.shape[1] - 1), np.float32)
        np.put_along_axis(whole, scores.token_ids[:, 1:].astype(np.int64), scores.logprobs[:, 1:], -1)
        return whole


def windows(ids: Sequence[int], window: int) -> Iterator[Sequence[int]]:
    """Yield the whole windows of a text."""
    for start in range(0, len(ids) - window + 1, window):
        yield ids[start : start + window]


def negative_loglikelihood(logprobs: Floats, ids: Sequence[int]) -> Floats:
    """Return that of each token but the first [n - 1]."""
    return -np.take_along_axis(logprobs, np.array(ids[1:])[:, None], -1)[:, 0]


def divergence(base: Floats, other: Floats) -> Floats:
    """Return the KL divergence of each position [n], in nats. Words of probability 0 in both count nothing."""
    with np.errstate(invalid="ignore"):
        terms = np.exp(base) * (base - other)
    return np.where(np.isnan(terms), 0, terms).sum(-1, dtype=np.float64).astype(np.float32)


def measure(args: argparse.Namespace, ids: Sequence[int], folder: Path) -> Iterator[Quality]:
    """Yield the quality of the unquantised model in float32 and in --dtype, then that of each scheme.

    `folder`: for the log-probabilities.
    """
    texts = list(windows(ids, args.window))
    base_loss = 0.0
    for scheme in (BASE, *([NONE] if args.dtype != "float32" else []), *args.schemes):
        is_path = "/" in scheme
        quantization = None if scheme in (BASE, NONE) or is_path else scheme
        dtype = "float32" if scheme == BASE else args.dtype
        scorer = Scorer(scheme if is_path else args.model, quantization, args.backend, dtype, args.window)
        losses, divergences, same = [], [], []
        try:
            for number, text in enumerate(texts):
                logprobs, path = scorer.logprobs(text), folder / f"{number}.npy"
                if scheme == BASE:
                    np.save(path, logprobs)
                base = np.load(path, mmap_mode="r")
                losses.append(negative_loglikelihood(logprobs, text))
                divergences.append(divergence(base, logprobs))
                same.append(base.argmax(-1) == logprobs.argmax(-1))
        finally:
            scorer.close()
        loss, kl = float(np.concatenate(losses).mean()), np.concatenate(divergences)
        base_loss = loss if scheme == BASE else base_loss
        yield Quality(
            scheme=Path(scheme).name if is_path else scheme,
            perplexity=round(float(np.exp(loss)), 4),
            loss_percent=round(100 * float(np.exp(loss - base_loss) - 1), 3),
            kl_mean=round(float(kl.mean()), 6),
            kl_99=round(float(np.quantile(kl, 0.99)), 6),
            same_best=round(float(np.concatenate(same).mean()), 4),
        )


def main() -> None:
    about, _, usage = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(description=about, epilog=usage, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--schemes", nargs="+", default=["int8", "fp8", "int4"])
    parser.add_argument("--backend", default="reference")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    tokenizer = open_tokenizer(EngineArgs(args.model).create_engine_config())
    assert tokenizer is not None
    text = args.text.read_text(encoding="utf-8")
    ids = tokenizer.encode(text)[: args.tokens]
    if len(ids) < args.window:
        parser.error(f"--text has {len(ids)} tokens, fewer than --window {args.window}")
    used = len(ids) // args.window * args.window
    rows = []
    print(f"{'scheme':<28}{'perplexity':>12}{'loss %':>10}{'KL mean':>10}{'KL 99 %':>10}{'same best':>11}")
    with tempfile.TemporaryDirectory() as folder:
        for row in measure(args, ids, Path(folder)):
            rows.append(asdict(row))
            numbers = f"{row.perplexity:>12.3f}{row.loss_percent:>10.2f}{row.kl_mean:>10.5f}{row.kl_99:>10.5f}"
            print(f"{row.scheme:<28}{numbers}{row.same_best:>11.3f}", flush=True)
    report: dict[str, Any] = {
        "model": Path(args.model).name,
        "backend": args.backend,
        "dtype": args.dtype,
        "text": {"file": args.text.name, "sha256": hashlib.sha256(text.encode()).hexdigest(), "tokens": used},
        "window": args.window,
        "schemes": rows,
        **machine(),
    }
    if args.output is not None:
        args.output.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
