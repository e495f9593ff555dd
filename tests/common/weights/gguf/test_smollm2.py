"""A real GGUF checkpoint, read whole: the same bfloat16 values as transformers' conversion of the file."""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from pagoda.common.models.registry import spec_from_config
from pagoda.common.models.shapes import params
from pagoda.common.weights.checkpoint import open_checkpoint
from pagoda.common.weights.quantization.export import hugging_face_tensors
from pagoda.common.weights.quantization.tensors import QuantizedTensor
from pagoda.common.weights.rules import apply_rules

# SHA-256 over the sorted names, each followed by the SHA-256 of its bfloat16 values, of what transformers 5.19 makes
# of the file: AutoModelForCausalLM.from_pretrained(folder, gguf_file=..., dtype=torch.bfloat16).save_pretrained(...).
CONVERTED = "3483d6f2edbc7c62a8b9d09a5d4ae4942094169967275cbf1470e1f46aaea099"
PATH = os.environ.get("PAGODA_TEST_MODEL", "")

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(not Path(PATH).is_file(), reason="PAGODA_TEST_MODEL names no SmolLM2 checkpoint"),
]


def test_every_tensor_equals_transformers() -> None:
    checkpoint = open_checkpoint(PATH)
    spec, family = spec_from_config(checkpoint.config())
    parameters, stored = params(spec), checkpoint.family(family)
    weights = apply_rules(stored.rules, parameters, checkpoint.tensors(), stored.ignored)
    exported = hugging_face_tensors("LlamaForCausalLM", family, parameters, weights)
    digests = {name: hashlib.sha256(array.astype(ml_dtypes.bfloat16)).digest() for name, array in exported}
    whole = hashlib.sha256(b"".join(name.encode() + digests[name] for name in sorted(digests)))
    assert whole.hexdigest() == CONVERTED
    sizes = [value.nbytes for _, value in checkpoint.tensors()]
    assert (checkpoint.num_tensors, checkpoint.num_bytes) == (len(digests), sum(sizes))


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
    served = dict(checkpoint.tensors())["blk.0.attn_q.weight"]
    assert isinstance(served, QuantizedTensor)
    np.testing.assert_array_equal(served.dequantize()[0:32], stored[0:64:2])
    np.testing.assert_array_equal(served.dequantize()[32:64], stored[1:64:2])
