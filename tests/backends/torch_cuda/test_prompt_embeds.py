"""Steps with embeddings in place of tokens: they run as they come, beside captured steps."""

from __future__ import annotations

import pytest
from support.embedded_requests import SPECS, check_rows_say_what_tokens_say

from pagoda.backends.torch_cuda.device import CPU


@pytest.mark.parametrize("kind", SPECS)
def test_prompt_embeds_equal_their_tokens(kind: str) -> None:
    check_rows_say_what_tokens_say(kind, "torch_cuda", 40, device=CPU)
