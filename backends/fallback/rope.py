"""RoPE of transformers' models whose frequencies depend on the length of a sequence, fixed at the served context."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from torch import nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

LENGTH_DEPENDENT: Final = ("dynamic", "longrope", "su", "yarn_dynamic")
"""Kinds of RoPE whose frequencies depend on the longest sequence of a batch in transformers' code, or a model's own."""


def fix_frequencies(model: nn.Module, max_len: int) -> int:
    """Fix the frequencies at those of sequences of `max_len` tokens; return the number of tables fixed.

    Cached keys then stay valid. Only tables that transformers' own code updates are found.
    """
    fixed = 0
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        for layer, kind in (kinds if isinstance(kinds, Mapping) else {None: kinds}).items():
            if kind in LENGTH_DEPENDENT and kind in ROPE_INIT_FUNCTIONS:
                _fix(module, kind, layer, max_len)
                fixed += 1
    return fixed


def _fix(module: Any, kind: str, layer: str | None, max_len: int) -> None:
    """Set the frequencies of the layers of one type (None: of all), and end their updates."""
    section = module.config.rope_parameters
    trained = module.config.max_position_embeddings
    if kind == "longrope":
        trained = (section if layer is None else section[layer])["original_max_position_embeddings"]
    name = "inv_freq" if layer is None else f"{layer}_inv_freq"
    if max_len > trained:  # Up to the trained length the initial frequencies hold.
        more = {} if layer is None else {"layer_type": layer}
        device = getattr(module, name).device
        frequencies, _ = ROPE_INIT_FUNCTIONS[kind](module.config, device, seq_len=max_len, **more)
        module.register_buffer(name, frequencies, persistent=False)
    module.rope_type = "default" if layer is None else {**module.rope_type, layer: "default"}
