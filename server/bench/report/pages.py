"""Self-contained HTML pages: requests over time, and tables and charts of results. They load nothing from elsewhere."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from typing import Any, Final

from pagoda.server.bench.online.metrics import Outcome

COLOURS: Final = ("#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2", "#be185d", "#4d7c0f")
_WAITING: Final = "#94a3b8"
_SPEEDS: Final = ("#16a34a", "#f59e0b", "#dc2626")  # Colours of tokens: fast, between the thresholds, slow.
_STYLE: Final = """
body{font:14px/1.45 system-ui,sans-serif;margin:24px auto;max-width:1100px;padding:0 16px;color:#1e293b;background:#fff}
h1{font-size:20px}h2{font-size:16px;margin-top:28px}p,td,th{color:#334155}
table{border-collapse:collapse;font-variant-numeric:tabular-nums}div.wide{overflow-x:auto}
th,td{padding:4px 10px;border-bottom:1px solid #e2e8f0;text-align:right;white-space:nowrap}
th{background:#f8fafc;text-align:right;position:sticky;top:0}th:first-child,td:first-child{text-align:left}
svg{background:#fff;max-width:100%;height:auto}svg text{font:11px system-ui,sans-serif;fill:#475569}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(480px,1fr));gap:16px}
.key i{display:inline-block;width:11px;height:11px;border-radius:2px;margin:0 5px 0 14px}
"""


def page(title: str, *parts: str) -> str:
    """Return an HTML page with a heading and further parts, which are HTML."""
    name = escape(title)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{name}</title>\n'
        f"<style>{_STYLE}</style></head><body>\n<h1>{name}</h1>\n" + "\n".join(parts) + "\n</body></html>\n"
    )


def html_table(columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> str:
    """Return an HTML table of some columns of rows."""
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(_shown(row.get(column)))}</td>" for column in columns) + "</tr>\n"
        for row in rows
    )
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table></div>'


def key_of(entries: Iterable[tuple[str, str]]) -> str:
    """Return a legend of (label, colour)."""
    return (
        '<p class="key">'
        + "".join(f'<i style="background:{colour}"></i>{escape(label)}' for label, colour in entries)
        + "</p>"
    )


@dataclass(frozen=True, slots=True)
class Scale:
    """Maps values from `low` to `high` to pixels from `start` to `end`."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        span = self.high - self.low or 1.0
        return round(self.start + (value - self.low) / span * (self.end - self.start), 2)

    def ticks(self, count: int = 5) -> list[float]:
        """Return about `count` round values in range."""
        raw = (self.high - self.low or 1.0) / count
        unit = 10.0 ** math.floor(math.log10(raw))
        step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= raw)
        first = math.ceil(self.low / step - 1e-9)
        return [index * step for index in range(first, math.floor(self.high / step + 1e-9) + 1)]


def line_chart(title: str, series: Mapping[str, Sequence[tuple[float, float]]], x_label: str, y_label: str) -> str:
    """Return an SVG chart of named series, each a line through its points; the legend has them if there are several."""
    width = 520
    height = 320
    left = 68
    right = 16
    top = 34
    bottom = 46
    points = [point for curve in series.values() for point in curve]
    if not points:
        return ""
    x = Scale(min(0.0, *(p[0] for p in points)), max(p[0] for p in points), left, width - right)
    y = Scale(min(0.0, *(p[1] for p in points)), max(p[1] for p in points) * 1.05, height - bottom, top)
    parts = [f'<text x="{left}" y="18" style="font-weight:600;font-size:13px">{escape(title)}</text>']
    for tick in y.ticks():
        parts.append(f'<line x1="{left}" x2="{width - right}" y1="{y(tick)}" y2="{y(tick)}" stroke="#e2e8f0"/>')
        parts.append(f'<text x="{left - 6}" y="{y(tick) + 4}" text-anchor="end">{tick:g}</text>')
    for tick in x.ticks():
        parts.append(f'<text x="{x(tick)}" y="{height - bottom + 16}" text-anchor="middle">{tick:g}</text>')
    middle = (top + height - bottom) / 2
    parts.append(
        f'<text x="{(left + width - right) / 2}" y="{height - 8}" text-anchor="middle">{escape(x_label)}</text>'
    )
    parts.append(
        f'<text x="14" y="{middle}" text-anchor="middle" transform="rotate(-90 14 {middle})">{escape(y_label)}</text>'
    )
    for (name, values), colour in zip(series.items(), _repeat(COLOURS)):
        path = " ".join(f"{x(a)},{y(b)}" for a, b in values)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for a, b in values:
            label = escape(f"{name}: {x_label} {a:g}, {y_label} {b:g}")
            parts.append(f'<circle cx="{x(a)}" cy="{y(b)}" r="4" fill="{colour}"><title>{label}</title></circle>')
    legend = key_of(zip(series, _repeat(COLOURS))) if len(series) > 1 else ""
    return f"<div>{_svg(width, height, parts)}{legend}</div>"


def timeline_page(outcomes: Sequence[Outcome], thresholds: Sequence[float], title: str) -> str:
    """Return a page with a bar for each request: the wait for its first token, then its tokens by speed.

    `thresholds`: two inter-token latencies in milliseconds.
    """
    good = sorted((outcome for outcome in outcomes if not outcome.error), key=lambda outcome: outcome.start)
    failed = len(outcomes) - len(good)
    if not good:
        return page(f"Requests over time: {title}", f"<p>All {failed} requests failed.</p>")
    first = good[0].start
    bar = 9
    left = 40
    width = 1060
    x = Scale(0.0, max(outcome.end for outcome in good) - first, left, width - 10)
    height = bar * len(good) + 40
    parts = []
    for tick in x.ticks(10):
        parts.append(f'<line x1="{x(tick)}" x2="{x(tick)}" y1="20" y2="{height - 18}" stroke="#e2e8f0"/>')
        parts.append(f'<text x="{x(tick)}" y="14" text-anchor="middle">{tick:g} s</text>')
    for index, outcome in enumerate(good):
        top = 22 + bar * index
        label = (
            f"request {index}: {outcome.prompt_tokens} tokens in, {outcome.output_tokens} out; first token after "
            f"{outcome.ttft * 1000:.0f} ms, whole answer {outcome.latency * 1000:.0f} ms"
        )
        rects = "".join(
            f'<rect x="{x(start)}" y="{top}" width="{max(0.5, x(end) - x(start)):.2f}" height="{bar - 2}" '
            f'fill="{colour}"/>'
            for start, end, colour in _segments(outcome, first, thresholds)
        )
        parts.append(f"<g>{rects}<title>{escape(label)}</title></g>")
    low, high = thresholds
    legend = key_of(
        [
            ("waiting for the first token", _WAITING),
            (f"tokens within {low:g} ms", _SPEEDS[0]),
            (f"{low:g} to {high:g} ms", _SPEEDS[1]),
            (f"over {high:g} ms", _SPEEDS[2]),
        ]
    )
    note = f"<p>{len(good)} requests{f', and {failed} that failed' if failed else ''}, in the order they were sent.</p>"
    return page(f"Requests over time: {title}", note, legend, _svg(width, height, parts))


def _segments(outcome: Outcome, first: float, thresholds: Sequence[float]) -> Iterator[tuple[float, float, str]]:
    """Yield (start, end, colour) in seconds since `first`; successive tokens of one colour are one segment."""
    start = outcome.start - first + outcome.ttft
    yield outcome.start - first, start, _WAITING
    for speed, gaps in groupby(outcome.gaps, key=lambda gap: sum(gap * 1000.0 > limit for limit in thresholds)):
        end = start + sum(gaps)
        yield start, end, _SPEEDS[speed]
        start = end


def _svg(width: int, height: int, parts: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {width} {height}" width="{width}" height="{height}">{"".join(parts)}</svg>'


def _repeat(colours: Sequence[str]) -> Iterator[str]:
    while True:
        yield from colours


def _shown(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:,.2f}" if isinstance(value, float) else str(value)
