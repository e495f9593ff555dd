"""Solar Pro: Llama's block; some layers read a blend with what came before an earlier one."""

from __future__ import annotations

from dataclasses import replace

from pagoda.common.models.families.llama_block.llama import LLAMA, llama
from pagoda.common.models.hf_config import HfConfig
from pagoda.common.models.spec import Blend, ModelSpec


def _solar(config: HfConfig) -> ModelSpec:
    config.default("rms_norm_eps", 1e-5)
    config.expect("sliding_window", None, 2047)  # of the training, which the model's code does not apply
    spec = llama(config)
    shares = config.opt("bskcn_tv", list, [0.9, 0.8])  # in training and after it
    if len(shares) != 2 or not all(type(share) in (int, float) for share in shares):
        raise config.error("bskcn_tv", f"is {shares}; it must be two numbers")
    blends: dict[int, Blend] = {}
    for begin, end in (("bskcn_1", "bskcn_3"), ("bskcn_2", "bskcn_4")):
        begins = config.opt(begin, list, [])
        ends = config.opt(end, list, [])
        for layer in ends:
            earlier = [first for first in begins if first < layer]
            if not earlier or layer in blends or layer in begins:
                raise config.error(end, f"is {ends}; each must follow one of {begin}, {begins}, and come once")
            blends[layer] = Blend(max(earlier), float(shares[1]))
    layers = (replace(layer, blend=blends.get(index)) for index, layer in enumerate(spec.layers))
    return replace(spec, layers=tuple(layers))


SOLAR = replace(LLAMA, build=_solar)
