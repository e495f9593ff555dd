"""GET /tokenizer_info, with --enable-tokenizer-info-endpoint: what a client needs to build prompts itself."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from pagoda.common.errors import RequestError
from pagoda.server.routes.shared import server_of

router = APIRouter(tags=["tokenizer"])


@router.get("/tokenizer_info")
async def tokenizer_info(request: Request) -> dict[str, Any]:
    """The tokenizer, under the keys of a tokenizer_config.json."""
    state = server_of(request)
    llm, tokenizer = state.llm(), state.tokenizer()
    if tokenizer is None:
        raise RequestError("", "the tokenizer is switched off (--skip-tokenizer-init)")
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": llm.max_model_len,
        "vocab_size": tokenizer.vocab_size,
        **tokenizer.special_tokens,
        "chat_template": state.chat_template if state.chat_template is not None else tokenizer.chat_template,
        "added_tokens_decoder": {
            str(token_id): {"content": token.content, "special": token.special}
            for token_id, token in sorted(tokenizer.backend.get_added_tokens_decoder().items())
        },
    }
