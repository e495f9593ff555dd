"""Steps with embeddings in place of tokens, on the reference backend."""

from __future__ import annotations

import pytest
from support.embedded_requests import SPECS, check_rows_say_what_tokens_say


@pytest.mark.parametrize("kind", SPECS)
def test_prompt_embeds_equal_their_tokens(kind: str) -> None:
    check_rows_say_what_tokens_say(kind, "reference", 40)
