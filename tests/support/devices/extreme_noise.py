"""Token ids whose noise is the most extreme: the hash turned round."""

import numpy as np

from pagoda.common.engine.sampling.rules import MIX_1, MIX_2, TOKEN_STRIDE

SPACE = 1 << 32


def token_with_bits(key: int, bits: int) -> int:
    """The token id that a row with `key` hashes to `bits`."""
    x = bits ^ bits >> 16
    x = x * pow(MIX_2, -1, SPACE) % SPACE
    x ^= x >> 15 ^ x >> 30
    x = x * pow(MIX_1, -1, SPACE) % SPACE
    x ^= x >> 16
    return (x ^ key) * pow(TOKEN_STRIDE, -1, SPACE) % SPACE


def extreme_tokens(key: int) -> np.ndarray:
    """uint32: the lowest and the highest noise of a row, and their neighbours."""
    return np.array(
        [token_with_bits(key, bits) for bits in (0, 1, 0x1FF, 0xFFFFFE00, 0xFFFFFF00, SPACE - 1)], np.uint32
    )
