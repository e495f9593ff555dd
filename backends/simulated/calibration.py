"""Step times fitted to measured steps, and the file that keeps them.

A step of one token per sequence (its drafts count as further tokens) and one with chunks of prompts have tables of
their own: a curve over the number of tokens, one over the context that is read, and costs per unit of what else grows.
All are fitted together by non-negative least squares of relative errors, so that no cost is negative and short steps
count as much as long ones.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from pagoda.backends.simulated.device import CacheBytes, HostCosts
from pagoda.backends.simulated.step_time import StepLoad, StepTimeModel
from pagoda.common.backend import BackendOptions
from pagoda.common.config.defaults import Platform
from pagoda.common.errors import ConfigError
from pagoda.common.models.shapes import params
from pagoda.common.models.spec import ModelSpec
from pagoda.common.weights.quantization.schemes import ScaledScheme

FLAG: Final = "--calibration"
FORMAT: Final = 1
"""Version of the file; others are refused."""

Kind = Literal["decode", "mixed"]
Float64 = npt.NDArray[np.float64]

TERMS: Final[Mapping[Kind, tuple[str, ...]]] = {"decode": (), "mixed": ("pairs", "chunks", "singles", "sampled")}
"""What a step costs beside its tokens and the context that sequences with one token read: pairs of a chunk's token and
one that it attends to, sequences with a chunk, sequences with one token, positions with logits."""

CONTEXT_KNOTS: Final = tuple(4**exponent for exponent in range(4, 12))
"""Tokens of context at which the curve of its cost may bend."""

MOST_WEIGHT: Final = 16
"""Steps of a shape that count in a fit, at most: other shapes count, too."""

FIT_ROUNDS: Final = 4
"""Least squares in turn, each weighted by the fit before."""

LEAST_SECONDS: Final = 1e-6
"""No step is shorter."""


def kind_of(load: StepLoad) -> Kind:
    """Return the table of a step."""
    return "decode" if load.num_tokens - load.num_drafts == len(load.query_lens) else "mixed"


def context_of(load: StepLoad) -> float:
    """Return the tokens of context that sequences with one token read; a draft reads what its sequence does."""
    query = load.query_lens
    context = load.context_lens
    if kind_of(load) == "decode":
        return float((query * context).sum())
    return float(context[query == 1].sum())


def terms_of(load: StepLoad) -> dict[str, float]:
    """Return the amount of every term of a step."""
    if kind_of(load) == "decode":
        return {}
    chunk = load.query_lens > 1
    query = load.query_lens[chunk]
    before = load.context_lens[chunk] - load.query_lens[chunk]
    return {
        "pairs": float((query * before + query * (query + 1) // 2).sum()),
        "chunks": float(len(query)),
        "singles": float(len(chunk) - len(query)),
        "sampled": float(load.num_sampled),
    }


class CostCurve(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds by an amount: linear between points, and after the last as before it."""

    at: tuple[int, ...]  # The amounts of the points, ascending.
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        ascending = all(one < other for one, other in zip(self.at, self.at[1:]))
        if not self.at or len(self.at) != len(self.seconds) or not ascending:
            raise ValueError("the points of a curve must ascend, with as many seconds")
        if not all(np.isfinite(value) and value >= 0 for value in self.seconds):
            raise ValueError("seconds must be finite and not negative")

    def __call__(self, amount: float) -> float:
        return float(hat_weights(self.at, amount) @ np.array(self.seconds))


class CostTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Costs of one kind of step."""

    tokens: CostCurve
    context: CostCurve
    per: dict[str, float]  # Term -> seconds per unit.

    def __post_init__(self) -> None:
        if not all(np.isfinite(value) and value >= 0 for value in self.per.values()):
            raise ValueError("seconds must be finite and not negative")

    def seconds_of(self, load: StepLoad) -> float:
        """Return the time of a step."""
        terms = terms_of(load)
        cost = self.tokens(load.num_tokens) + self.context(context_of(load))
        return max(cost + sum(seconds * terms[name] for name, seconds in self.per.items()), LEAST_SECONDS)


def hat_weights(knots: Sequence[int], amount: float) -> Float64:
    """Return the weights of values at `knots` [n] that interpolate at `amount`; beyond the last, in its direction."""
    weights = np.zeros(len(knots))
    if len(knots) == 1 or amount <= knots[0]:
        weights[0] = 1.0
        return weights
    right = min(bisect_left(knots, amount), len(knots) - 1)
    share = (amount - knots[right - 1]) / (knots[right] - knots[right - 1])
    weights[right - 1 : right + 1] = 1 - share, share
    return weights


class MeasuredStep(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A step that was measured."""

    query_lens: list[int]
    context_lens: list[int]
    num_sampled: int
    num_drafts: int
    seconds: float  # The mean time of the steps.
    count: int = 1  # Number of steps in the mean.

    @property
    def load(self) -> StepLoad:
        """What it computed."""
        query = np.array(self.query_lens, np.int64)
        context = np.array(self.context_lens, np.int64)
        return StepLoad(query, context, self.num_sampled, self.num_drafts)


class FitError(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How far a fit is from what was measured: relative errors, 0.1 is 10 %."""

    mean: float
    largest: float
    bias: float  # Mean of the signed errors: above 0, the model is slower than the measurement.

    def __str__(self) -> str:
        return f"mean error {self.mean:.1%}, largest {self.largest:.1%}, bias {self.bias:+.1%}"


class Fit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Fitted step times. Implements StepTimeModel."""

    tables: dict[Kind, CostTable]
    errors: dict[Kind, FitError]

    def __post_init__(self) -> None:
        if self.tables.keys() != TERMS.keys():
            raise ValueError(f"tables of {' and '.join(TERMS)} steps are needed")

    def seconds(self, load: StepLoad) -> float:
        """Return the seconds of a step."""
        return self.tables[kind_of(load)].seconds_of(load)


def fit(steps: Sequence[MeasuredStep]) -> Fit:
    """Return the step times that fit measured steps best. Raises ValueError if a kind of step is missing."""
    tables = {}
    errors = {}
    for kind in TERMS:
        steps_of_kind = [step for step in steps if kind_of(step.load) == kind]
        if not steps_of_kind:
            raise ValueError(f"no {kind} step was measured")
        tables[kind] = _fit_table(kind, steps_of_kind)
        errors[kind] = error_of(tables[kind], steps_of_kind)
    return Fit(tables, errors)


def _fit_table(kind: Kind, steps: Sequence[MeasuredStep]) -> CostTable:
    """Return the costs of one kind of step. Errors are relative to the fit, not to what was measured: its noise would
    else make the fit too fast.
    """
    loads = [step.load for step in steps]
    tokens = knots_near([load.num_tokens for load in loads], [1 << exponent for exponent in range(24)])
    context = (0, *knots_near([context_of(load) for load in loads if context_of(load)], CONTEXT_KNOTS))
    rows = np.array(
        [
            np.concatenate(
                [
                    hat_weights(tokens, load.num_tokens),
                    hat_weights(context, context_of(load))[1:],  # No context costs nothing.
                    [terms_of(load)[name] for name in TERMS[kind]],
                ]
            )
            for load in loads
        ]
    )
    measured = np.array([step.seconds for step in steps])
    weights = np.sqrt(np.minimum([step.count for step in steps], MOST_WEIGHT))
    expected = measured
    for _ in range(FIT_ROUNDS):
        costs = non_negative_least_squares(rows * (weights / expected)[:, None], weights * measured / expected)
        expected = np.maximum(rows @ costs, LEAST_SECONDS)
    of_tokens, of_context, per = np.split(costs, [len(tokens), len(tokens) + len(context) - 1])
    return CostTable(
        CostCurve(tokens, tuple(np.maximum.accumulate(of_tokens).tolist())),  # More tokens never take less time.
        CostCurve(context, (0.0, *np.maximum.accumulate(of_context).tolist())),
        dict(zip(TERMS[kind], per.tolist())),
    )


def knots_near(amounts: Sequence[float], ladder: Sequence[int]) -> tuple[int, ...]:
    """Return the least and the largest amount, and those of a ladder between them that some amounts are near to."""
    if not len(amounts):
        return ()
    numbers = np.array(sorted(amounts))
    first = int(numbers[0])
    last = int(numbers[-1])
    near = [size for size in ladder if (np.abs(np.log2(numbers / size)) <= np.log2(ladder[1] / ladder[0]) / 2).any()]
    return tuple(sorted({first, last, *(size for size in near if first < size < last)}))


def error_of(table: CostTable, steps: Sequence[MeasuredStep]) -> FitError:
    """Return how far a table is from measured steps."""
    errors = np.array([table.seconds_of(step.load) / step.seconds - 1 for step in steps])
    return FitError(float(np.abs(errors).mean()), float(np.abs(errors).max()), float(errors.mean()))


def non_negative_least_squares(a: Float64, b: Float64) -> Float64:
    """Return the x [n] >= 0 that minimises |a x - b|, for a [m, n] and b [m].

    Active-set method of Lawson and Hanson, Solving Least Squares Problems (1974), chapter 23, on columns scaled to 1.
    """
    scale = np.linalg.norm(a, axis=0)
    scale[scale == 0] = 1.0
    a = a / scale
    x = np.zeros(a.shape[1])
    free = np.zeros(a.shape[1], np.bool_)
    tolerance = 1e-10 * max(1.0, float(np.abs(a.T @ b).max(initial=0.0)))
    for _ in range(10 * a.shape[1]):
        gradient = np.where(free, -np.inf, a.T @ (b - a @ x))
        if gradient.max(initial=-np.inf) <= tolerance:
            break
        free[int(gradient.argmax())] = True
        while True:
            candidate = np.zeros_like(x)
            candidate[free] = np.linalg.lstsq(a[:, free], b, rcond=None)[0]
            blocked = free & (candidate <= 0)
            if not blocked.any():
                break
            with np.errstate(divide="ignore", invalid="ignore"):
                steps = np.where(blocked, x / (x - candidate), np.inf)
            x = x + float(np.nan_to_num(steps, nan=0.0).min()) * (candidate - x)
            free &= x > 1e-14
            x[~free] = 0.0
        x = candidate
    return x / scale


# The file.


class MeasuredPlatform(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The machine; see Platform."""

    kind: Literal["cpu", "cuda", "tpu"]
    memory_bytes: int
    device_name: str


class Calibration(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What `pagoda calibrate` measured of a model on a device. Implements SimulatedDevice."""

    format: int
    model: str
    parameters: int  # Number of the model's parameters: no other model is simulated with these times.
    backend: str
    device: str
    created: str  # UTC time at which the file was written.
    version: str  # The version of pagoda that wrote the file.
    settings: dict[str, str | int]  # Settings of the engine whose steps were measured.
    machine: MeasuredPlatform
    prefers_extents: bool
    kv_cache_bytes: int
    block_bytes: list[int]  # Bytes of a block, by pool.
    block_elements: list[int]  # Elements of a block, by pool.
    weight_bytes: int
    host: HostCosts
    fit: Fit
    steps: list[MeasuredStep]

    @property
    def name(self) -> str:
        """The device, in words."""
        return f"{self.device}, calibrated {self.created}"

    @property
    def platform(self) -> Platform:
        return Platform(self.machine.kind, self.machine.memory_bytes, self.machine.device_name)

    def step_time(self, options: BackendOptions) -> StepTimeModel:
        """Return the fitted step times. Raises ConfigError for another model or other settings than were measured."""
        if (count := num_parameters(options)) != self.parameters:
            raise ConfigError(
                FLAG, f"it is of {self.model}, with {self.parameters} parameters, the model has {count}; calibrate it"
            )
        for name, measured in self.settings.items():
            if (value := settings_of(options)[name]) != measured:
                flag = "--" + name.replace("_", "-")
                raise ConfigError(
                    flag, f"{value}, but {FLAG} was measured with {measured}; use that, or calibrate again"
                )
        return self.fit

    def cache_bytes(self, options: BackendOptions) -> CacheBytes:
        """Return the memory of the KV cache, as it was when the steps were measured."""
        elements = [pool.block_elements for pool in options.layout.pools]
        sizes = zip(self.block_bytes, self.block_elements, elements, strict=True)
        return CacheBytes(
            self.kv_cache_bytes, tuple(size * now // then for size, then, now in sizes), self.weight_bytes
        )

    def as_json(self) -> bytes:
        """Return the content of the file."""
        return msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n"

    def report(self) -> str:
        """Return how well the model of step times fits, and what the engine's thread costs, in words."""
        lines = [f"{self.model} on {self.name}: {len(self.steps)} steps"]
        for kind, error in self.fit.errors.items():
            counts = self.fit.tables[kind].tokens.at
            shown = (f"{1e3 * self.fit.seconds(_example(kind, counts[n])):.1f} ms with {counts[n]}" for n in (0, -1))
            lines.append(f"{kind} steps: {error}; {', '.join(shown)} tokens")
        host = self.host
        lines.append(
            f"the engine's thread: {host.plan_step * 1e3:.3f} + {host.report_step * 1e3:.3f} ms per step, "
            f"{(host.plan_sequence + host.report_sequence) * 1e6:.1f} us per sequence, "
            f"{host.start_request * 1e6:.0f} us per request; "
            f"a step after a pause takes {host.after_pause * 1e3:.1f} ms more"
        )
        return "\n".join(lines)


def _example(kind: Kind, tokens: int) -> StepLoad:
    """Return a step of sequences with 512 tokens of context, or of one prompt's first chunk."""
    query = np.ones(tokens, np.int64) if kind == "decode" else np.array([tokens], np.int64)
    return StepLoad(query, np.maximum(query, 512 if kind == "decode" else 0), len(query))


def num_parameters(options: BackendOptions) -> int:
    """Return the parameters of the model; 0 for one that transformers computes."""
    spec = options.spec
    return sum(param.size for param in params(spec).values()) if isinstance(spec, ModelSpec) else 0


def settings_of(options: BackendOptions) -> dict[str, str | int]:
    """Return the settings that step times hold for, by name."""
    return {
        "dtype": options.dtype,
        "kv_cache_dtype": options.cache.cache_dtype,
        "quantization": options.quantization or _schemes(options) or "none",
        "tensor_parallel_size": options.parallel.tensor,
    }


def _schemes(options: BackendOptions) -> str:
    """Return the kinds of quantised matrices of a checkpoint, as text."""
    names = (
        type(scheme).__name__ + ("" if isinstance(scheme, ScaledScheme) else f" {scheme.kind.name}")
        for scheme in options.schemes.values()
    )
    return ", ".join(sorted(set(names)))


def read_calibration(path: Path) -> Calibration:
    """Return the calibration in a file. Raises ConfigError if it is none."""
    try:
        calibration = msgspec.json.decode(path.read_bytes(), type=Calibration)
    except OSError as error:
        raise ConfigError(FLAG, f"{path}: {error.strerror}; write it with `pagoda calibrate`") from None
    except (msgspec.MsgspecError, ValueError) as error:
        raise ConfigError(FLAG, f"{path} is no calibration: {error}; write one with `pagoda calibrate`") from None
    if calibration.format != FORMAT:
        raise ConfigError(FLAG, f"{path} has format {calibration.format}, not {FORMAT}; calibrate again")
    return calibration
