"""Random requests of every kind, for the tests of the JAX backend's engine."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pagoda.common.engine.messages import EngineRequest
from pagoda.common.engine.sampling.rules import SamplingRules


def requests(count: int, seed: int) -> Iterator[EngineRequest]:
    """Every kind of rule, every length."""
    rng = np.random.default_rng(seed)
    for number in range(count):
        prompt = rng.integers(3, 96, rng.integers(1, 40)).tolist()
        options = {
            "temperature": rng.choice([0.0, 1.0]),
            "top_k": int(rng.choice([0, 5])),
            "top_p": float(rng.choice([1.0, 0.7])),
            "repetition_penalty": float(rng.choice([1.0, 1.2])),
            "logit_bias": ((4, 2.0),) if rng.random() < 0.2 else (),
            "allowed_token_ids": tuple(range(50)) if rng.random() < 0.1 else None,
            "bad_words": ((7,), (8, 9)) if rng.random() < 0.1 else (),
            "logprobs": int(rng.choice([0, 2, -1])) if rng.random() < 0.2 else None,
            "prompt_logprobs": 1 if rng.random() < 0.1 else None,
            "seed": number,
        }
        rules = SamplingRules(**options)
        yield EngineRequest(
            request_id=str(number),
            prompt_token_ids=prompt,
            rules=rules,
            max_tokens=int(rng.integers(1, 12)),
            stop_token_ids=frozenset({1}),
        )
