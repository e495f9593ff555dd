import numpy as np
import torch
from support.devices.extreme_noise import extreme_tokens

from pagoda.backends.reference import sampling
from pagoda.common.engine.sampling.rules import gumbel


def test_noise_is_finite_for_every_token_and_the_definitions():
    ids = extreme_tokens(12345)
    noise = sampling.gumbel(torch.tensor([12345], dtype=torch.int32), torch.from_numpy(ids.view(np.int32)))
    assert torch.isfinite(noise).all()
    np.testing.assert_allclose(noise.numpy(), gumbel(np.array([12345], np.uint32), ids), rtol=1e-5)
