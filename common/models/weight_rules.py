"""Weight-name rules of a family: which checkpoint tensor fills which parameter. `common.weights.rules` applies them.

A pattern is a dotted name in which `{l}` and `{e}` stand for a layer's and an expert's index, and a leading `[part.]`
is optional. Several rules may fill the same parameter from alternative names.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rename:
    """One tensor fills one parameter; `transpose` swaps its two axes first."""

    source: str
    target: str
    transpose: bool = False


@dataclass(frozen=True, slots=True)
class Split:
    """One tensor is split along axis 0 (after `transpose`) into several parameters, sized by their shapes."""

    source: str
    targets: tuple[str, ...]
    transpose: bool = False


@dataclass(frozen=True, slots=True)
class Stack:
    """Tensors numbered `{e}` are stacked along a new axis 0 into one parameter."""

    source: str
    target: str


Rule = Rename | Split | Stack


def linear(source: str, target: str) -> tuple[Rule, ...]:
    """Rules of a linear layer: its weight and its optional bias."""
    return Rename(f"{source}.weight", target), Rename(f"{source}.bias", f"{target}_bias")


def fused_linear(source: str, *targets: str) -> tuple[Rule, ...]:
    """Rules of several linear layers stored as one fused tensor."""
    biases = tuple(f"{target}_bias" for target in targets)
    return Split(f"{source}.weight", targets), Split(f"{source}.bias", biases)
