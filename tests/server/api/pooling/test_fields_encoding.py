"""Wire encodings of vectors: bit-identical to torch's conversions, in both byte orders."""

import base64
import io
import sys

import numpy as np
import pytest
import torch
from support.suite.rows import each_row

from pagoda.server.api.pooling.encoding import (
    EMBED_DTYPES,
    ENDIANNESS,
    EmbedDType,
    Encoding,
    Endianness,
    MetadataItem,
    binary2tensor,
    decode_pooling_output,
    tensor2base64,
    tensor2binary,
)

TYPES: dict[EmbedDType, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}


def odd_numbers() -> np.ndarray:
    """Return values of all magnitudes, ties, and NaN."""
    random = np.random.default_rng(3)
    sizes = random.normal(size=4000) * 10.0 ** random.integers(-12, 6, 4000)
    ties = [value for exponent in range(-20, 17) for value in np.arange(16, 33) / 16 * 2.0**exponent]
    odd = [0.0, -0.0, np.nan, np.inf, -np.inf, 448, 464, 465, 57344, 61439, 61440, 65504, 65520, 1e30]
    return np.array([*sizes, *ties, *(-np.array(ties)), *odd], np.float32)


@each_row("dtype", TYPES)
def test_conversions_match_torch(dtype: EmbedDType) -> None:
    vector = odd_numbers()
    if dtype == "fp8_e4m3":  # versions of torch differ on overflow
        vector = vector[~(np.abs(vector) > 448)]
    whole = torch.from_numpy(vector).to(TYPES[dtype])
    encoded = torch.frombuffer(bytearray(Encoding("bytes", dtype).in_bytes(vector)), dtype=TYPES[dtype])
    assert torch.equal(whole.isnan(), encoded.float().isnan())
    size = encoded.element_size()
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[size]
    real = ~whole.isnan()
    assert torch.equal(whole.view(bits)[real], encoded.view(bits)[real])


def test_e4m3_saturates() -> None:
    sent = Encoding("bytes", "fp8_e4m3").in_bytes(np.array([500, -1e9, np.inf], np.float32))
    assert torch.frombuffer(bytearray(sent), dtype=torch.float8_e4m3fn).float().tolist() == [448, -448, 448]


@each_row("dtype", TYPES)
def test_byte_orders(dtype: EmbedDType) -> None:
    vector = np.array([0.1, -2.5, 3.25], np.float32)
    little, big = (Encoding("base64", dtype, order).in_bytes(vector) for order in ("little", "big"))
    size = len(little) // 3
    assert big == b"".join(little[at : at + size][::-1] for at in range(0, len(little), size))
    assert Encoding("base64", dtype).in_bytes(vector) == (little if sys.byteorder == "little" else big)


def test_json() -> None:
    rows = np.array([[0.5, 1.0], [2.0, 3.0]], np.float32)
    assert Encoding().in_json(rows) == [[0.5, 1.0], [2.0, 3.0]]
    assert np.frombuffer(base64.b64decode(Encoding("base64").in_json(rows)), np.float32).tolist() == [0.5, 1, 2, 3]
    assert [Encoding(name).is_binary for name in ("float", "base64", "bytes", "bytes_only")] == [
        False,
        False,
        True,
        True,
    ]


@pytest.mark.parametrize("endianness", ENDIANNESS)
@pytest.mark.parametrize("dtype", EMBED_DTYPES)
def test_clients_read_what_is_written(dtype: EmbedDType, endianness: Endianness) -> None:
    tensor = torch.tensor([[0.5, -2.0, 0.0], [1.5, 8.0, -0.25]])
    binary = tensor2binary(tensor, dtype, endianness)
    assert len(binary) == 6 * EMBED_DTYPES[dtype].nbytes
    back = binary2tensor(binary, (2, 3), dtype, endianness)
    assert back.dtype is EMBED_DTYPES[dtype].torch_dtype
    assert torch.equal(back.float(), tensor)
    items = [
        MetadataItem(index, dtype, endianness, start=size * index, end=size * (index + 1), shape=(3,))
        for size in (len(binary) // 2,)
        for index in (1, 0)
    ]
    assert [row.float().tolist() for row in decode_pooling_output(items, binary)] == tensor.tolist()
    with pytest.raises(ValueError, match="reshape"):
        binary2tensor(binary, (7,), dtype, endianness)


def test_prompt_embeds_of_clients() -> None:
    tensor = torch.rand(2, 3)
    assert torch.equal(torch.load(io.BytesIO(base64.b64decode(tensor2base64(tensor)))), tensor)
