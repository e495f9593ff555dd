"""Steps with embeddings in place of tokens, on every backend."""

from __future__ import annotations

from typing import Any

import support.devices.jax_devices
from support.servers.embedded_requests import SPECS, check_rows_say_what_tokens_say
from support.suite.slow_matrix import thinned

from pagoda.backends.torch_cuda.device import CPU

assert support.devices.jax_devices.DEVICES > 1

OPTIONS: dict[str, dict[str, Any]] = {
    "reference": {},
    "torch_cuda": {"device": CPU},
    "jax_tpu": {},
}


@thinned(lambda backend, kind: backend != "jax_tpu" or kind == "narrow", backend=list(OPTIONS), kind=list(SPECS))
def test_prompt_embeds_equal_their_tokens(backend: str, kind: str) -> None:
    check_rows_say_what_tokens_say(kind, backend, 12 if backend == "jax_tpu" else 40, **OPTIONS[backend])
