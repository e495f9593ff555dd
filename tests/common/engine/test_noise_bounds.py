import numpy as np
from support.extreme_noise import SPACE, extreme_tokens, token_with_bits

from pagoda.common.engine.sampling import TOKEN_STRIDE, gumbel, mix


def test_the_noise_hash_is_invertible():
    key = np.array([12345], np.uint32)
    for bits in (0, 77, SPACE - 1):
        token = np.array([token_with_bits(12345, bits)], np.uint32)
        assert mix(key ^ token * np.uint32(TOKEN_STRIDE)) == bits


def test_noise_is_finite_for_every_token():
    """One infinite value in 2**23 would choose a random token in every hundred steps."""
    noise = gumbel(np.array([12345], np.uint32), extreme_tokens(12345))
    assert np.isfinite(noise).all()
    assert -3.0 < noise.min() < -2.5
    assert 16.0 < noise.max() < 17.0
