from dataclasses import replace

import pytest
import torch

from pagoda.backends.torch_cuda.kernels.attention.rope_cache import NormWeights, RopeCache

NAN = float("nan")
SHAPES = {
    # query heads, KV heads, head dim, rotated channels, page size
    "grouped": (4, 2, 16, 16, 4),
    "partial": (3, 1, 20, 6, 2),
    "still": (2, 2, 16, 0, 8),
    "many": (40, 20, 64, 64, 4),
    "values are keys": (4, 2, 16, 16, 4),
    "narrow values": (4, 2, 20, 6, 4),
}
VALUE_DIM = {"narrow values": 13}


def rope_and_cache(qkv, positions, slots, keys, values, **layer) -> torch.Tensor:
    return RopeCache(keys, values, **layer)(qkv, positions, slots)


def _case(shape: str, dtype: torch.dtype, cache: torch.dtype, normed: bool):
    """Arguments, with NaN in rows past the end, in unused rows of tables and in the cache."""
    heads, kv_heads, head_dim, rotated, page = SHAPES[shape]
    seed = torch.Generator().manual_seed(5)

    def random(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=seed)

    value_dim = VALUE_DIM.get(shape, head_dim)
    width = (heads + kv_heads) * head_dim + (0 if shape == "values are keys" else kv_heads * value_dim)
    around = torch.full((4, width + 3), NAN, dtype=dtype)
    around[:3, :width] = random(3, width)
    positions = torch.tensor([6, 0, 2], dtype=torch.int32)
    cos_sin = torch.full((9, 2, rotated // 2), NAN)
    cos_sin[positions] = random(3, 2, rotated // 2)
    slots = torch.tensor([4 * page - 1, 0, 2 * page + 1], dtype=torch.int32)
    keys, values = (torch.full((5, kv_heads, page, dim), NAN).to(cache) for dim in (head_dim, value_dim))
    facts = {
        "heads": heads,
        "kv_heads": kv_heads,
        "cos_sin": cos_sin if rotated else None,
        "q_norm": NormWeights(random(head_dim).to(dtype), 1e-5) if normed else None,
        "k_norm": NormWeights(random(head_dim).to(dtype), 1e-6, unit_offset=True) if normed else None,
        "v_norm": NormWeights(random(value_dim).to(dtype), 1e-4) if normed else None,
        "values_are_keys": shape == "values are keys",
    }
    if cache == torch.float8_e4m3fn:
        facts |= {"k_scale": torch.tensor([0.25]), "v_scale": torch.tensor([1.5])}
    return (around[:3, :width], positions, slots, keys, values), facts


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("dtype", "cache"),
    [
        (torch.float32, torch.float32),
        (torch.float16, torch.float16),
        (torch.float32, torch.float8_e4m3fn),
        (torch.float16, torch.float8_e4m3fn),
    ],
)
def test_the_kernel_writes_what_the_reference_does_alone(dtype, cache, shape, normed) -> None:
    got, want = [], []
    for use_kernel, result in ((True, got), (False, want)):
        arguments, facts = _case(shape, dtype, cache, normed)
        result.append(rope_and_cache(*arguments, **facts, use_kernel=use_kernel))
        result += [part.float() for part in arguments[3:]]
    near = {"rtol": 3e-6, "atol": 3e-6} if dtype == torch.float32 else {"rtol": 2e-3, "atol": 2e-3}
    for mine, its in zip(got, want):
        torch.testing.assert_close(mine, its, **near, equal_nan=True)
    kv_heads, head_dim = SHAPES[shape][1:3]
    assert int((~got[1].isnan()).sum()) == 3 * kv_heads * head_dim
    assert int((~got[2].isnan()).sum()) == 3 * kv_heads * VALUE_DIM.get(shape, head_dim)


def test_the_reference_rotates_pairs_and_writes_token_by_token() -> None:
    arguments, facts = _case("grouped", torch.float32, torch.float32, False)
    qkv, positions, _, keys, values = arguments
    q = rope_and_cache(*arguments, **facts, use_kernel=False)
    token, channel = 2, 5
    cos, sin = facts["cos_sin"][positions[token], :, channel]
    first, second = qkv[token, 16 + channel], qkv[token, 16 + channel + 8]
    assert torch.isclose(q[token, 1, channel], first * cos - second * sin)
    assert torch.isclose(q[token, 1, channel + 8], second * cos + first * sin)
    key = qkv[token, 4 * 16 : 5 * 16]
    assert torch.isclose(keys[2, 0, 1, channel], key[channel] * cos - key[channel + 8] * sin)
    assert torch.equal(values[2, 1, 1], qkv[token, 7 * 16 :])


def test_values_are_the_projected_keys_normalised() -> None:
    arguments, facts = _case("values are keys", torch.float32, torch.float32, True)
    qkv, _, _, _, values = arguments
    rope_and_cache(*arguments, **facts, use_kernel=False)
    key = qkv[2, 5 * 16 :]
    normed = key / (key.square().mean() + 1e-4).sqrt() * facts["v_norm"].weight
    torch.testing.assert_close(values[2, 1, 1], normed)


def test_values_beyond_the_float8_range_saturate() -> None:
    for use_kernel in (False, True):
        arguments, facts = _case("grouped", torch.float16, torch.float8_e4m3fn, False)
        arguments[0].mul_(3e3)
        rope_and_cache(*arguments, **facts, use_kernel=use_kernel)
        written = arguments[3].float()
        assert float(written[~written.isnan()].abs().max()) == 448.0


def test_what_does_not_fit_is_refused() -> None:
    arguments, facts = _case("grouped", torch.float32, torch.float32, True)
    qkv, positions, slots, keys, values = arguments
    for wrong in (
        (qkv[:, :-1], positions, slots, keys, values),
        (qkv, positions.long(), slots, keys, values),
        (qkv, positions, slots[:2], keys, values),
        (qkv, positions, slots, keys[:, :1], values),
        (qkv, positions, slots, keys, values.half()),
        (qkv, positions, slots, keys.transpose(1, 2), values),
    ):
        with pytest.raises(ValueError, match=r"qkv|positions|slots|keys|values"):
            rope_and_cache(*wrong, **facts, use_kernel=False)
    for other in (
        {"cos_sin": torch.zeros(9, 2, 9)},
        {"cos_sin": torch.zeros(9, 2, 8, dtype=torch.float64)},
        {"q_norm": replace(facts["q_norm"], weight=torch.ones(4))},
        {"k_scale": torch.ones(1)},
    ):
        with pytest.raises(ValueError, match=r"cos_sin|norm|scale"):
            rope_and_cache(*arguments, **{**facts, **other}, use_kernel=False)


def test_no_tokens_are_no_error() -> None:
    arguments, facts = _case("grouped", torch.float32, torch.float32, False)
    none = [part[:0] for part in arguments[:3]]
    assert rope_and_cache(*none, *arguments[3:], **facts, use_kernel=True).shape == (0, 4, 16)
