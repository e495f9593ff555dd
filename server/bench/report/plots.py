"""PNG plots with matplotlib, an optional package."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pagoda.common.errors import ConfigError
from pagoda.server.bench.online.metrics import Outcome

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def need_matplotlib(flag: str) -> None:
    """Raise ConfigError if matplotlib is not installed."""
    if find_spec("matplotlib") is None:
        raise ConfigError(flag, "needs matplotlib; install it: pip install 'pagoda[bench]'")


def figure(rows: int, columns: int, width: float, height: float) -> tuple[Figure, list[list[Axes]]]:
    """Return an empty figure of subplots, each of a size in inches."""
    from matplotlib.figure import Figure  # The import is optional and slow.

    drawn = Figure(figsize=(width * columns, height * rows), layout="constrained")
    return drawn, drawn.subplots(rows, columns, squeeze=False).tolist()


def save(drawn: Figure, path: Path, dpi: float) -> None:
    """Write a figure as PNG. Raises ConfigError if the file cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        drawn.savefig(path, dpi=dpi)
    except OSError as error:
        raise ConfigError("--fig-dir", f"{path}: {error.strerror}") from None


def draw_series(axes: Axes, series: Mapping[str, Sequence[tuple[float, float, float]]], *, error_bars: bool) -> None:
    """Draw series of (x, mean of y, standard deviation of y) as lines with markers."""
    for name, points in series.items():
        x, y, deviation = zip(*sorted(points))
        bars: dict[str, Any] = {"yerr": deviation, "capsize": 3} if error_bars and any(deviation) else {}
        axes.errorbar(x, y, marker="o", label=name or None, **bars)
    if any(series):
        axes.legend(fontsize="small")
    axes.grid(visible=True, linestyle="--", linewidth=0.5, alpha=0.6)


def plot_lengths(outcomes: Sequence[Outcome], path: Path) -> None:
    """Write histograms of the prompt, output and total lengths of the requests that succeeded."""
    good = [outcome for outcome in outcomes if not outcome.error]
    inputs = [outcome.prompt_tokens for outcome in good]
    outputs = [outcome.output_tokens for outcome in good]
    drawn, ((*all_axes,),) = figure(1, 3, 4.5, 3.6)
    totals = [a + b for a, b in zip(inputs, outputs)]
    for axes, title, lengths in zip(all_axes, ("Prompt", "Output", "Prompt + output"), (inputs, outputs, totals)):
        axes.hist(lengths, bins=min(40, max(1, len(set(lengths)))))
        mean = sum(lengths) / max(1, len(lengths))
        axes.set_title(f"{title}: mean {mean:.0f} tokens")
        axes.set_xlabel("tokens")
        axes.set_ylabel("requests")
    save(drawn, path, 150)
