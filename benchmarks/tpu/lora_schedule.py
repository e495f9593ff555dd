"""What low-rank adapters cost on a TPU beside the layer's own products, by the TPU compiler's schedule. Needs no TPU.

    python benchmarks/tpu/lora_schedule.py [--chip v6e] [--json FILE]

The linear maps of Llama-3-8B's layers, in a scan over LAYERS of them, without and with adapters:

- masked: x times the A of all slots, zero but for the token's own slot, times the B of all slots, as `jax_tpu` computes
  them;
- gathered: each token's own A and B, copied from the slots;
- ragged: tokens sorted by slot, `jax.lax.ragged_dot`.

Cycles: the sum of what the compiler estimates for each operation, per layer. Temporary: bytes of HBM for copies and
intermediate values. Bytes: of all A and B of a layer, which a step reads once at best.
"""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

LAYERS = 8
WIDTH = 4096
GROUPS = {
    "qkv": (4096, (4096, 1024, 1024)),
    "o": (4096, (4096,)),
    "inner": (4096, (14336, 14336)),
    "down": (14336, (4096,)),
}
"""Projections of one input: its width, and the outputs of each."""

FORMS = ("masked", "gathered", "ragged")


@dataclass(frozen=True)
class Case:
    """A step of `tokens` tokens with adapters of `rank` in `slots` slots."""

    tokens: int
    slots: int
    rank: int


CASES = (Case(64, 8, 16), Case(64, 8, 64), Case(64, 32, 16), Case(8, 8, 16), Case(2048, 8, 16))


def layer(form: str | None, case: Case, x: Any, weights: Any, slots: Any) -> Any:
    """Return x [T, D] after the products of a layer; `form` None: without adapters."""
    import jax.numpy as jnp

    def product(name: str, x: Any) -> Any:
        base = jnp.dot(x, weights[name])
        if form is None:
            return base
        bs = [weights[f"{name}.b{n}"] for n in range(len(GROUPS[name][1]))]
        return base + added(form, case, x, weights[f"{name}.a"], bs, slots)

    heads = product("qkv", x)
    x = x + product("o", heads[:, :4096])
    gate, up = jnp.split(product("inner", x), 2, 1)
    return x + product("down", gate * up)


def added(form: str, case: Case, x: Any, a: Any, bs: list[Any], slots: Any) -> Any:
    """Return [T, O] for x [T, I], a [S * P * R, I] and b [S * R, O] of each projection; slots int32 [T]."""
    import jax
    import jax.numpy as jnp

    count, rank, parts = case.slots, case.rank, len(bs)
    if form == "masked":
        inner = jnp.einsum("td,rd->tr", x, a).reshape(len(x), parts, count, rank)
        own = slots[:, None, None, None] == jnp.arange(count)[:, None]
        inner = jnp.where(own, inner, 0).reshape(len(x), parts, count * rank)
        return jnp.concatenate([jnp.dot(inner[:, n], b) for n, b in enumerate(bs)], 1)
    if form == "gathered":
        own_a = a.reshape(parts, count, rank, -1)[:, slots]
        inner = jnp.einsum("td,ptrd->ptr", x, own_a)
        outs = [jnp.einsum("tr,tro->to", inner[n], b.reshape(count, rank, -1)[slots]) for n, b in enumerate(bs)]
        return jnp.concatenate(outs, 1)
    order = jnp.argsort(slots)
    sizes = (slots[:, None] == jnp.arange(count)).sum(0).astype(jnp.int32)
    rows = x[order]
    stacked = a.reshape(parts, count, rank, -1).transpose(1, 3, 0, 2).reshape(count, x.shape[1], parts * rank)
    inner = jax.lax.ragged_dot(rows, stacked, sizes).reshape(len(x), parts, rank)
    outs = [jax.lax.ragged_dot(inner[:, n], b.reshape(count, rank, -1), sizes) for n, b in enumerate(bs)]
    return jnp.concatenate(outs, 1)[jnp.argsort(order)]


def figures(chip_name: str, case: Case, form: str | None) -> dict[str, float]:
    """Return cycles, microseconds and temporary MB, per layer."""
    import jax
    import jax.numpy as jnp

    from pagoda.backends.jax_tpu.ahead_of_time.schedule import read_schedule
    from pagoda.backends.jax_tpu.execution.program_kind import compiler_options
    from pagoda.backends.jax_tpu.execution.step_input import KernelChoice
    from pagoda.benchmarks.tpu.aot.compiler import one_chip
    from pagoda.kernels_pallas.chips import CHIPS

    chip, sharding = CHIPS[chip_name], one_chip(chip_name)

    def array(*shape: int, dtype: Any = jnp.bfloat16) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    weights = {}
    for name, (inputs, outputs) in GROUPS.items():
        weights[name] = array(LAYERS, inputs, sum(outputs))
        if form is not None:
            weights[f"{name}.a"] = array(LAYERS, len(outputs) * case.slots * case.rank, inputs)
            weights |= {f"{name}.b{n}": array(LAYERS, case.slots * case.rank, out) for n, out in enumerate(outputs)}

    def run(x: Any, weights: Any, slots: Any) -> Any:
        return jax.lax.scan(lambda x, each: (layer(form, case, x, each, slots), None), x, weights)[0]

    arguments = array(case.tokens, WIDTH), weights, array(case.tokens, dtype=jnp.int32)
    options = compiler_options(KernelChoice(128, "bfloat16", use_kernel=True, chip=chip))
    program = jax.jit(run, compiler_options=options).lower(*arguments).compile()
    cycles = read_schedule(program.as_text() or "").cycles / LAYERS
    memory: Any = program.memory_analysis()
    return {
        "cycles": cycles,
        "microseconds": cycles / chip.clock_hz * 1e6,
        "temporary MB": memory.temp_size_in_bytes / 1e6,
    }


def report(chip_name: str) -> list[dict[str, Any]]:
    """Print and return the figures of every case."""
    from pagoda.kernels_pallas.chips import CHIPS

    chip, rows, base = CHIPS[chip_name], [], {}
    for case in CASES:
        if case.tokens not in base:
            base[case.tokens] = figures(chip_name, case, None)
            print(f"{case.tokens} tokens, no adapters: {base[case.tokens]}", flush=True)
        elements = sum(case.slots * case.rank * (len(out) * width + sum(out)) for width, out in GROUPS.values())
        least = 2 * elements / chip.hbm_bandwidth * 1e6
        for form in FORMS:
            own = figures(chip_name, case, form)
            more = own["microseconds"] - base[case.tokens]["microseconds"]
            row = {
                **{"tokens": case.tokens, "slots": case.slots, "rank": case.rank, "form": form, **own},
                **{"added microseconds": more, "microseconds of the bytes of A and B": least},
                "added share": more / base[case.tokens]["microseconds"],
            }
            print(row, flush=True)
            rows.append(row)
    return [{"form": "none", "tokens": tokens, **each} for tokens, each in base.items()] + rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chip", default="v6e")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    args = parser.parse_args()
    os.environ |= {"JAX_PLATFORMS": "cpu", "TPU_WORKER_HOSTNAMES": "localhost"}  # before jax
    rows = report(args.chip)
    if args.json:
        from importlib.metadata import version

        versions = {name: version(name) for name in ("jax", "jaxlib", "libtpu")}
        made = {"date": date.today().isoformat(), "chip": args.chip, "layers": LAYERS, "versions": versions}
        args.json.write_text(json.dumps({**made, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
