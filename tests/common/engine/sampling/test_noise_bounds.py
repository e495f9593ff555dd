import numpy as np
from support.devices.extreme_noise import SPACE, extreme_tokens, token_with_bits

from pagoda.common.engine.sampling.rules import TOKEN_STRIDE, gumbel, mix


def test_the_noise_hash_is_invertible():
    key = np.array([12345], np.uint32)
    for bits in (0, 77, SPACE - 1):
        token = np.array([token_with_bits(12345, bits)], np.uint32)
        assert mix(key ^ token * np.uint32(TOKEN_STRIDE)) == bits


def test_noise_is_finite_for_every_token():
    """One infinite value in 2**32 would choose a random token in every ten thousand steps."""
    noise = gumbel(np.array([12345], np.uint32), extreme_tokens(12345))
    assert np.isfinite(noise).all()
    assert -3.0 < noise.min() < -2.5
    assert 22.5 < noise.max() < 23.0


def test_noise_is_exact_where_tokens_win():
    """Of the smallest numbers, each of which is a noise of its own: -log(-log1p(-v)) to an ulp."""
    numbers = [*range(40), 1000, 1 << 14, (1 << 20) + 1, 1 << 27]
    tokens = np.array([token_with_bits(12345, bits) for bits in numbers], np.uint32)
    noise = gumbel(np.array([12345], np.uint32), tokens)[0]
    want = -np.log(-np.log1p(-(np.array(numbers, np.float64) + 0.5) * 2.0**-32))
    np.testing.assert_allclose(noise, want, rtol=2e-7)
    assert (np.diff(noise) < 0).all()
