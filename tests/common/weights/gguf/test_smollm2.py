"""A real GGUF checkpoint, read whole: the same bfloat16 values as transformers' conversion of the file."""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from pagoda.common.weights.checkpoint import open_checkpoint
from pagoda.common.weights.quantization.tensors import QuantizedTensor

# SHA-256 over the sorted names, each followed by the SHA-256 of its bfloat16 values, of what transformers 5.19 makes
# of the file: AutoModelForCausalLM.from_pretrained(folder, gguf_file=..., dtype=torch.bfloat16).save_pretrained(...).
CONVERTED = "3483d6f2edbc7c62a8b9d09a5d4ae4942094169967275cbf1470e1f46aaea099"
PATH = os.environ.get("PAGODA_TEST_MODEL", "")

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(not Path(PATH).is_file(), reason="PAGODA_TEST_MODEL names no SmolLM2 checkpoint"),
]


def test_every_tensor_equals_transformers() -> None:
    checkpoint, digests, size = open_checkpoint(PATH), {}, 0
    for name, value in checkpoint.tensors():
        array = value.dequantize() if isinstance(value, QuantizedTensor) else value
        digests[name] = hashlib.sha256(array.astype(ml_dtypes.bfloat16)).digest()
        size += value.nbytes
    whole = hashlib.sha256(b"".join(name.encode() + digests[name] for name in sorted(digests)))
    assert whole.hexdigest() == CONVERTED
    assert (checkpoint.num_tensors, checkpoint.num_bytes) == (len(digests), size)


def test_config_and_end_of_text() -> None:
    checkpoint = open_checkpoint(PATH)
    config = checkpoint.config()
    assert {key: config[key] for key in ("architectures", "head_dim", "rope_theta", "vocab_size", "dtype")} == {
        "architectures": ["LlamaForCausalLM"],
        "head_dim": 64,
        "rope_theta": 100000.0,
        "vocab_size": 49152,
        "dtype": "bfloat16",
    }
    assert checkpoint.generation_config() == {"bos_token_id": 1, "eos_token_id": [2], "pad_token_id": 2}


def test_common_types_do_not_load_the_gguf_package() -> None:
    import subprocess

    code = (
        "import sys; from pagoda.common.weights.checkpoint import open_checkpoint;"
        f"c = open_checkpoint({PATH!r}); c.config(); next(c.tensors()); c.gguf_metadata;"
        "assert not {'gguf', 'tqdm', 'huggingface_hub', 'safetensors', 'torch'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_rotary_rows_are_half_split() -> None:
    checkpoint = open_checkpoint(PATH)
    stored = checkpoint.file.tensor("blk.0.attn_q.weight")  # type: ignore[attr-defined]
    served = dict(checkpoint.tensors())["model.layers.0.self_attn.q_proj.weight"]
    assert isinstance(served, QuantizedTensor)
    np.testing.assert_array_equal(served.dequantize()[0:32], stored[0:64:2])
    np.testing.assert_array_equal(served.dequantize()[32:64], stored[1:64:2])
