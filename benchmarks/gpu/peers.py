"""The same loads with other implementations: torch, flash_attn, flashinfer, transformers and vLLM.

`attention` checks every peer against our own kernel before timing it; a peer that is missing or refuses a shape reports
so in the number. `engines` runs the load of the throughput stage with other engines.
"""

from __future__ import annotations

import importlib
import inspect
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from pagoda.benchmarks.gpu import model
from pagoda.benchmarks.gpu.engine import LOADS, prompts
from pagoda.benchmarks.gpu.kernels import decode_attention, prefill_attention
from pagoda.benchmarks.gpu.measure import BF16, Bench, Number, package_version

AGREE = 0.02
"""Maximum relative distance to our result: two bfloat16 kernels differ by 0.003 to 0.01."""

DECODES = {
    "1x8k": decode_attention.Load(1, 8192),
    "32x1k": decode_attention.Load(32, 1024),
    "64x4k": decode_attention.Load(64, 4096),
    "256x1k": decode_attention.Load(256, 1024),
}
PREFILLS = {
    "1x8k": prefill_attention.Load(((8192, 0),)),
    "8x1k": prefill_attention.Load(((1024, 0),) * 8),
}


def attention(bench: Bench) -> Iterator[Number]:
    """Yield every load with our kernel and every peer."""
    for name, load in list(DECODES.items())[: bench.choose(None, 2)]:
        load = decode_attention.small(load) if bench.tiny else load
        yield Number(f"decode {name} ours", partial(ours_decode, bench, load))
        for peer in (sdpa_decode, varlen_decode, flash_decode, flashinfer_decode):
            yield Number(f"decode {name} {peer.__name__.split('_')[0]}", partial(decode_by, bench, load, peer), 120)
    for name, load in PREFILLS.items():
        load = prefill_attention.Load(((20, 0), (20, 0)), heads=8, head_dim=16, kv_heads=2) if bench.tiny else load
        yield Number(f"prefill {name} ours", partial(prefill_by, bench, load, None))
        for peer in (sdpa_prefill, varlen_prefill, flash_prefill):
            yield Number(f"prefill {name} {peer.__name__.split('_')[0]}", partial(prefill_by, bench, load, peer), 120)


def distance(got: Tensor, want: Tensor) -> float:
    """Return the distance of two results relative to the second."""
    return float((got.double() - want.double()).norm() / want.double().norm())


def absent(error: Exception) -> dict:
    """Return the result for a peer that is missing or does not support the load."""
    return {"absent": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:200]}


# Decode: every sequence has one query token.


def ours_decode(bench: Bench, load: decode_attention.Load) -> dict:
    return decode_attention.speed(bench, load)


def decode_by(bench: Bench, load: decode_attention.Load, peer: Callable[..., Callable[[], Tensor]]) -> dict:
    """Return microseconds of a peer over the same cache. `peer(inputs, copy)` prepares a call returning [S, N, H]."""
    inputs = decode_attention.make(load, bench, bench.choose(decode_attention.COLD_BYTES, 1))
    copies = len(inputs.tables)
    how = {"use_kernel": bench.use_kernel, "chip": bench.chip}
    try:
        calls = [peer(inputs, copy) for copy in range(copies)]
        got = calls[0]()
    except Exception as error:
        return absent(error)
    relative = distance(bench.spoiled(got), inputs.call(0, **how))
    result = {"right": relative <= AGREE, "distance": relative}
    try:
        replay = bench.recorded(calls)
        result["graph"] = True
    except Exception as error:
        torch.cuda.synchronize()
        result |= {"graph": False, "not_captured": str(error)[:100]}
        replay = partial(_all, calls)
    us = bench.median_ms(lambda _: replay()) * 1e3 / copies
    return result | {"us": us, "bytes_per_s": load.bytes_read / us * 1e6}


def _all(calls: list[Callable[[], Tensor]]) -> None:
    for call in calls:
        call()


def contiguous(inputs: decode_attention.Inputs, copy: int) -> tuple[Tensor, Tensor]:
    """Return K and V [S, K, C, H] of the copy's sequences, gathered from the pages; not timed."""
    load, table = inputs.load, inputs.tables[copy].long()
    parts = []
    for cache in (inputs.keys, inputs.values):
        pages = cache[table].permute(0, 2, 1, 3, 4)  # [S, K, W, B, H]
        parts.append(pages.reshape(load.seqs, load.kv_heads, -1, load.head_dim)[:, :, : load.context].contiguous())
    return parts[0], parts[1]


def sdpa_decode(inputs: decode_attention.Inputs, copy: int) -> Callable[[], Tensor]:
    """torch's scaled_dot_product_attention over contiguous K and V, the group's heads as query rows."""
    load = inputs.load
    keys, values = contiguous(inputs, copy)
    rows = inputs.q[copy].view(load.seqs, load.kv_heads, -1, load.head_dim)
    return lambda: F.scaled_dot_product_attention(rows, keys, values).reshape(load.seqs, load.heads, load.head_dim)


def varlen_decode(inputs: decode_attention.Inputs, copy: int) -> Callable[[], Tensor]:
    """torch.nn.attention.varlen over contiguous K and V: FlashAttention 2 as torch ships it."""
    load = inputs.load
    keys, values = (part.transpose(1, 2).flatten(0, 1).contiguous() for part in contiguous(inputs, copy))
    starts = torch.arange(load.seqs + 1, device=keys.device, dtype=torch.int32)
    call = varlen(inputs.q[copy], keys, values, starts, starts * load.context, 1, load.context, causal=False)
    return lambda: call().view(load.seqs, load.heads, load.head_dim)


def flash_decode(inputs: decode_attention.Inputs, copy: int) -> Callable[[], Tensor]:
    """FlashAttention 3, or 2, over contiguous K and V."""
    load = inputs.load
    function = _flash().flash_attn_with_kvcache
    keys, values = (part.transpose(1, 2).contiguous() for part in contiguous(inputs, copy))
    q = inputs.q[copy].view(load.seqs, 1, load.heads, load.head_dim)
    lens = inputs.kv_lens
    return lambda: function(q, keys, values, cache_seqlens=lens, causal=True).view(load.seqs, load.heads, load.head_dim)


def flashinfer_decode(inputs: decode_attention.Inputs, copy: int) -> Callable[[], Tensor]:
    """flashinfer over our own pages."""
    flashinfer = importlib.import_module("flashinfer")
    load, device = inputs.load, inputs.keys.device
    workspace = torch.empty(128 << 20, dtype=torch.uint8, device=device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=True)
    width, page = inputs.tables.shape[2], inputs.keys.shape[2]
    starts = torch.arange(load.seqs + 1, device=device, dtype=torch.int32) * width
    last = torch.full((load.seqs,), (load.context - 1) % page + 1, device=device, dtype=torch.int32)
    shape = load.heads, load.kv_heads, load.head_dim, page
    wrapper.plan(starts, inputs.tables[copy].flatten(), last, *shape, q_data_type=BF16, kv_data_type=BF16)
    return lambda: wrapper.run(inputs.q[copy], (inputs.keys, inputs.values))


# Prefill: all keys are new.


def prefill_by(bench: Bench, load: prefill_attention.Load, peer: Callable[..., Callable[[], Tensor]] | None) -> dict:
    """Return milliseconds of our kernel or a peer.

    `peer(load, q, k, v)`, each [T, n, H], prepares a call returning [T, N, H].
    """
    inputs = prefill_attention.make(load, bench.device, bench.chip)
    ours = partial(inputs.call, bench.chip, use_kernel=bench.use_kernel)
    call, result = ours, {}
    if peer is not None:
        try:
            call = peer(load, inputs.q, *_tokens(inputs))
            got = call()
        except Exception as error:
            return absent(error)
        relative = distance(bench.spoiled(got), ours())
        result = {"right": relative <= AGREE, "distance": relative}
    ms = bench.median_ms(lambda _: call(), 10)
    return result | {"ms": ms, "flop_per_s": load.flop / ms * 1e3}


def _tokens(inputs: prefill_attention.Inputs) -> Iterator[Tensor]:
    """Yield K and V [T, K, H] of all sequences, gathered from the pages; not timed."""
    for cache in (inputs.keys, inputs.values):
        pages = cache[inputs.tables.long()].transpose(2, 3).flatten(1, 2)  # [S, C, K, H]
        yield torch.cat([pages[at, :length] for at, length in enumerate(inputs.kv_lens.tolist())])


def sdpa_prefill(load: prefill_attention.Load, q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Tensor]:
    """torch's scaled_dot_product_attention over a batch of sequences of one length."""
    seqs = len(load.seqs)
    q, k, v = (part.view(seqs, -1, *part.shape[1:]).transpose(1, 2) for part in (q, k, v))

    def call() -> Tensor:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2).flatten(0, 1)

    return call


def varlen_prefill(load: prefill_attention.Load, q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Tensor]:
    """torch.nn.attention.varlen."""
    length = load.seqs[0][0]
    starts = torch.arange(len(load.seqs) + 1, device=q.device, dtype=torch.int32) * length
    return varlen(q, k, v, starts, starts, length, length, causal=True)


def flash_prefill(load: prefill_attention.Load, q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Tensor]:
    """FlashAttention 3, or 2."""
    function = _flash().flash_attn_varlen_func
    length = load.seqs[0][0]
    starts = torch.arange(len(load.seqs) + 1, device=q.device, dtype=torch.int32) * length

    def call() -> Tensor:
        out = function(q, k, v, starts, starts, max_seqlen_q=length, max_seqlen_k=length, causal=True)
        return out[0] if isinstance(out, tuple) else out

    return call


def varlen(q: Tensor, k: Tensor, v: Tensor, q_starts, k_starts, max_q: int, max_k: int, *, causal: bool):
    """torch's variable-length attention; arguments differ between versions, and some need K and V repeated."""
    function = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    known = inspect.signature(function).parameters
    how: dict = {}
    if "enable_gqa" in known:
        how["enable_gqa"] = True
    else:
        group = q.shape[1] // k.shape[1]
        k, v = (part.repeat_interleave(group, 1) for part in (k, v))
    if "window_size" in known:
        how["window_size"] = (-1, 0) if causal else (-1, -1)
    else:
        how["is_causal"] = causal
    return lambda: function(q, k, v, q_starts, k_starts, max_q, max_k, **how)


def _flash():
    """Return FlashAttention 3 if installed, else 2."""
    try:
        return importlib.import_module("flash_attn_interface")
    except ImportError:
        return importlib.import_module("flash_attn")


def engines(bench: Bench) -> Iterator[Number]:
    """Yield the load of the throughput stage with vLLM, and a smaller one with transformers' continuous batching."""
    requests, input_len, output_len, _ = LOADS["256x1024/1024"]
    load = bench.choose((requests, input_len, output_len), (3, 8, 4))
    config = bench.choose(model.CONFIG, model.TINY)
    yield Number("vllm 256x1024/1024", partial(by_vllm, bench, config, load), 400)
    fewer = bench.choose(LOADS["32x1024/128"][:3], (3, 8, 4))
    yield Number("transformers 32x1024/128", partial(by_transformers, bench, config, fewer), 300)


def by_vllm(bench: Bench, config: dict, load: tuple[int, int, int]) -> dict:
    """vLLM's LLM on the same random model."""
    requests, input_len, output_len = load
    try:
        vllm = importlib.import_module("vllm")
    except ImportError as error:
        return absent(error)
    folder = model.write(Path(tempfile.mkdtemp()) / "model", config)
    settings = {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "enable_prefix_caching": False,
    }
    llm = vllm.LLM(str(folder), max_model_len=input_len + output_len + 16, max_num_seqs=requests, **settings)
    rules = vllm.SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True, detokenize=False)
    llm.generate(prompts(config, 2, input_len), rules, use_tqdm=False)
    begin = time.perf_counter()
    done = llm.generate(prompts(config, requests, input_len), rules, use_tqdm=False)
    seconds = time.perf_counter() - begin
    tokens = sum(len(one.outputs[0].token_ids) for one in done)
    return {"version": vllm.__version__, **_rate(load, tokens, seconds)}


def by_transformers(bench: Bench, config: dict, load: tuple[int, int, int]) -> dict:
    """transformers' generate_batch with SDPA."""
    requests, input_len, output_len = load
    try:
        transformers = importlib.import_module("transformers")
    except ImportError as error:
        return absent(error)
    settings = transformers.AutoConfig.from_pretrained(model.write(Path(tempfile.mkdtemp()) / "model", config))
    torch.set_default_dtype(BF16)
    with torch.device(bench.device):
        decoder = transformers.AutoModelForCausalLM.from_config(settings, attn_implementation="sdpa").eval()
    torch.set_default_dtype(torch.float32)
    if not hasattr(decoder, "generate_batch"):
        return {"absent": f"transformers {transformers.__version__} has no generate_batch"}
    inputs = [one["prompt_token_ids"] for one in prompts(config, requests, input_len)]
    usual = {"do_sample": False, "eos_token_id": -1, "pad_token_id": 0, "use_cache": True}
    rules = transformers.GenerationConfig(max_new_tokens=output_len, **usual)
    try:
        decoder.generate_batch(inputs[:2], generation_config=rules)
    except Exception as error:
        return absent(error)
    begin = time.perf_counter()
    done = decoder.generate_batch(inputs, generation_config=rules)
    seconds = time.perf_counter() - begin
    tokens = sum(len(one.generated_tokens) for one in done.values())
    return {"version": package_version("transformers"), **_rate(load, tokens, seconds)}


def _rate(load: tuple[int, int, int], tokens: int, seconds: float) -> dict:
    requests, input_len, output_len = load
    sizes = {"requests": requests, "input": input_len, "output": output_len, "tokens": tokens}
    return sizes | {"seconds": seconds, "output_tokens_per_s": tokens / seconds}
