"""The noise is defined by its integers: these must never change, or seeds lose their meaning."""

from __future__ import annotations

import numpy as np

from pagoda.common.engine.sampling.rules import GREEDY_EPSILON, SamplingRules, gumbel, mix, noise_keys


def test_the_hash_is_lowbias32():
    def plain(x: int) -> int:
        x ^= x >> 16
        x = x * 0x7FEB352D & 0xFFFFFFFF
        x ^= x >> 15
        x = x * 0x846CA68B & 0xFFFFFFFF
        return x ^ x >> 16

    values = [0, 1, 2, 12345, 0xFFFFFFFF]
    assert mix(np.array(values, np.uint32)).tolist() == [plain(value) for value in values]


def test_keys_depend_on_the_whole_seed_and_on_the_position():
    seeds = np.array([0, 1, 1 << 40, -1], np.int64)
    keys = np.concatenate([noise_keys(seeds, np.full(4, position, np.int64)) for position in (0, 1, 7)])
    assert len(set(keys.tolist())) == 12


def test_noise_is_gumbel_and_belongs_to_row_and_token():
    keys = noise_keys(np.arange(8, dtype=np.int64), np.zeros(8, np.int64))
    noise = gumbel(keys, np.arange(20_000, dtype=np.uint32))
    assert noise.dtype == np.float32
    assert np.isfinite(noise).all()
    assert abs(float(noise.mean()) - 0.5772) < 0.01
    assert abs(float(noise.var()) - np.pi**2 / 6) < 0.03
    picked = gumbel(keys[3:4], np.array([[5, 77]], np.uint32))
    assert picked.tolist() == [noise[3, [5, 77]].tolist()]


def test_argmax_with_noise_follows_the_softmax():
    logits = np.log(np.array([0.6, 0.3, 0.1], np.float32))
    keys = noise_keys(np.full(20_000, 3, np.int64), np.arange(20_000, dtype=np.int64))
    picks = (logits + gumbel(keys, np.arange(3, dtype=np.uint32))).argmax(axis=1)
    assert np.abs(np.bincount(picks) / len(picks) - [0.6, 0.3, 0.1]).max() < 0.015


def test_what_counts_as_greedy_and_as_penalised():
    assert SamplingRules().is_greedy
    assert not SamplingRules(temperature=1e-3).is_greedy
    assert not SamplingRules(temperature=GREEDY_EPSILON).is_greedy
    assert SamplingRules(temperature=GREEDY_EPSILON / 2).is_greedy
    assert not SamplingRules().has_penalties
    for penalty in ({"presence_penalty": 0.1}, {"frequency_penalty": -1.0}, {"repetition_penalty": 1.1}):
        assert SamplingRules(**penalty).has_penalties


def test_what_needs_earlier_tokens():
    assert not SamplingRules(bad_words=((1,),)).reads_history
    assert SamplingRules(bad_words=((1,), (1, 2))).reads_history
    assert SamplingRules(presence_penalty=1.0).reads_history


def test_the_key_hashes_seed_and_position():
    def plain(x: int) -> int:
        return int(mix(np.array([x & 0xFFFFFFFF], np.uint32))[0])

    for seed, position in ((0, 0), (5, 7), (-1, 3), ((9 << 32) + 4, 1 << 20)):
        low, high = seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF
        keys = noise_keys(np.array([seed], np.int64), np.array([position], np.int64))
        assert keys.tolist() == [plain(plain(plain(low) ^ high) + position)]


def test_noise_comes_from_all_bits():
    key, token = np.array([77], np.uint32), 12
    bits = int(mix(key ^ np.array([token * 0x9E3779B9 & 0xFFFFFFFF], np.uint32))[0])
    want = -np.log(-np.log1p(-(bits + 0.5) / 2**32))
    np.testing.assert_allclose(gumbel(key, np.array([token], np.uint32)), [[want]], rtol=1e-5)
