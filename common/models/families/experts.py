"""Mixtures of experts: the config keys and the weight-name rules that many families share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from pagoda.common.models.family import Rename, Rule, Split, Stack, gated_mlp, linear
from pagoda.common.models.hf_config import HfConfig
from pagoda.common.models.spec import ExpertGroups, Ffn, Moe, Router

FFN: Final = "layers.{l}.ffn"


def expert_rules(
    source: str,
    gate: str = "gate_proj",
    up: str = "up_proj",
    down: str = "down_proj",
    *,
    moe: str = FFN,
    surplus: bool = False,
) -> tuple[Rule, ...]:
    """Rules of routed experts whose matrices are stored one by one. `surplus`: there may be more, that are dropped."""
    return (
        Stack(f"{source}.{{e}}.{gate}.weight", f"{moe}.experts.gate", surplus),
        Stack(f"{source}.{{e}}.{up}.weight", f"{moe}.experts.up", surplus),
        Stack(f"{source}.{{e}}.{down}.weight", f"{moe}.experts.down", surplus),
    )


def fused_expert_rules(source: str, moe: str = FFN) -> tuple[Rule, ...]:
    """Rules of routed experts stored as one tensor [E, D, 2F] of gate and up, and one [E, F, D]; or [E, out, in]."""
    gate_up = (f"{moe}.experts.gate", f"{moe}.experts.up")
    return (
        Split(f"{source}.gate_up_proj", gate_up, transpose="unless_it_fits", axis=1),
        Rename(f"{source}.down_proj", f"{moe}.experts.down", transpose="unless_it_fits"),
    )


def fused_or_single_expert_rules(source: str, moe: str = FFN) -> tuple[Rule, ...]:
    """`fused_expert_rules`, and those of the same experts one by one, as tools that quantise them write them."""
    return (*fused_expert_rules(source, moe), *expert_rules(source, moe=moe))


def shared_rules(source: str) -> tuple[Rule, ...]:
    """Rules of a shared Mlp."""
    return (
        *linear(f"{source}.gate_proj", f"{FFN}.shared.gate"),
        *linear(f"{source}.up_proj", f"{FFN}.shared.up"),
        *linear(f"{source}.down_proj", f"{FFN}.shared.down"),
    )


_SOURCE: Final = "[model.]layers.{l}.mlp"

MOE_RULES: Final[tuple[Rule, ...]] = (
    Rename(f"{_SOURCE}.gate.weight", f"{FFN}.router"),
    Rename(f"{_SOURCE}.gate.e_score_correction_bias", f"{FFN}.router_correction"),
    *expert_rules(f"{_SOURCE}.experts"),
    *shared_rules(f"{_SOURCE}.shared_experts"),
)

FUSED_EXPERT_RULES: Final[tuple[Rule, ...]] = fused_expert_rules(f"{_SOURCE}.experts")

BLOCK_SPARSE_RULES: Final[tuple[Rule, ...]] = (
    Rename("[model.]layers.{l}.block_sparse_moe.gate.weight", f"{FFN}.router"),
    Rename("[model.]layers.{l}.block_sparse_moe.e_score_correction_bias", f"{FFN}.router_correction"),
    *expert_rules("[model.]layers.{l}.block_sparse_moe.experts", "w1", "w3", "w2"),
)


_ROUTED: Final = (
    *("n_routed_experts", "n_shared_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob"),
    *("n_group", "topk_group", "topk_method", "scoring_func", "routed_scaling_factor"),
    *("ep_size", "seq_aux", "aux_loss_alpha"),
)


def leading_dense(config: HfConfig, moe: Callable[[], Moe], default: int, *, bias: bool = False) -> list[Ffn]:
    """Return the ffn of each layer: `first_k_dense_replace` dense ones, then mixtures; or as `mlp_layer_types` says.

    `moe` reads the keys of the mixtures, which mean nothing if all layers are dense. `bias`: of the dense ones.
    """
    layers = config.size("num_hidden_layers")
    first = config.opt("first_k_dense_replace", int, default)
    config.expect("moe_layer_freq", 1)
    kinds = config.ffn_kinds(layers, ["dense" if layer < first else "sparse" for layer in range(layers)])
    dense = gated_mlp(config, bias=bias)
    if "sparse" not in kinds:
        config.ignore(*_ROUTED)
        return [dense] * layers
    mixture = moe()
    return [mixture if kind == "sparse" else dense for kind in kinds]


def sparse_steps(config: HfConfig, moe: Moe) -> list[Ffn]:
    """Return the ffn of each layer: a mixture every `decoder_sparse_step`, except in `mlp_only_layers`."""
    layers = config.size("num_hidden_layers")
    dense = gated_mlp(config)
    mlp_only = config.opt("mlp_only_layers", list, [])
    step = config.opt_size("decoder_sparse_step", 1)
    return [dense if layer in mlp_only or (layer + 1) % step else moe for layer in range(layers)]


def routed_moe(config: HfConfig, router: Router, shared: int = 0) -> Moe:
    """Return a mixture of `n_routed_experts`, with `n_shared_experts` of the same width as one shared Mlp.

    `shared`: the family's default.
    """
    dense = gated_mlp(config)
    width = config.size("moe_intermediate_size")
    shared = config.opt("n_shared_experts", int, shared)
    return Moe(
        config.size("n_routed_experts"),
        replace(dense, width=width),
        router,
        replace(dense, width=shared * width) if shared else None,
    )


def corrected_sigmoid_router(config: HfConfig, *, renormalise: bool = True) -> Router:
    """Return a router with sigmoid scores, a score correction and groups. `renormalise`: the family's default."""
    config.expect("scoring_func", "sigmoid", "noaux_tc")
    config.expect("topk_method", "noaux_tc")
    config.ignore("ep_size", "seq_aux", "aux_loss_alpha")
    groups = ExpertGroups(config.opt_size("n_group", 1), config.opt_size("topk_group", 1), "best_two")
    return Router(
        config.size("num_experts_per_tok"),
        config.opt("norm_topk_prob", bool, renormalise),
        scores="sigmoid",
        correction=True,
        groups=None if groups.count == groups.used else groups,
        scale=config.opt("routed_scaling_factor", float, 1.0),
    )
