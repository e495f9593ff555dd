"""The tokenizer that the settings name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagoda.common.config.engine import EngineConfig
from pagoda.common.weights.hub import gguf_in, resolve_model

if TYPE_CHECKING:
    from pagoda.common.text.tokenizer import Tokenizer


def open_tokenizer(config: EngineConfig) -> Tokenizer | None:
    """Open the tokenizer of --tokenizer or of the model; None with skip_tokenizer_init. Raises ModelError."""
    from pagoda.common.text.tokenizer import load_tokenizer  # The import is slow.

    model = config.model
    load = config.load
    if model.skip_tokenizer_init:
        return None
    is_of_model = model.tokenizer is None or model.tokenizer == model.model
    path = resolve_model(
        model.model if model.tokenizer is None else model.tokenizer,
        load.load_format if is_of_model else "dummy",
        weights=False,
        revision=model.tokenizer_revision or (model.revision if is_of_model else None),
        token=model.hf_token,
        download_dir=load.download_dir,
        ignore_patterns=load.ignore_patterns,
    )
    has_own = (path / "tokenizer.json").exists()
    return load_tokenizer(path if has_own else gguf_in(path) or path)
