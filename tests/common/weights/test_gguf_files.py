"""Which GGUF file a quantisation names."""

from __future__ import annotations

import pytest

from pagoda.common.errors import ModelError
from pagoda.common.weights.hub import pick_gguf

FILES = [
    "Model-1B-Q4_K_M.gguf",
    "Model-1B-Q4_K_S.gguf",
    "Model-1B-IQ4_XS.gguf",
    "Model-1B.Q8_0.gguf",
    "model_f16.gguf",
    "BF16/Model-1B-BF16.gguf",
    "Q2_K/Model-1B-Q2_K-00001-of-00002.gguf",
    "Q2_K/Model-1B-Q2_K-00002-of-00002.gguf",
    "mmproj-Q8_0.gguf",
    "Model-1B-imatrix.gguf",
    "README.md",
]


@pytest.mark.parametrize(
    ("quant", "file"),
    [
        ("Q4_K_M", "Model-1B-Q4_K_M.gguf"),
        ("q4_k_s", "Model-1B-Q4_K_S.gguf"),
        ("IQ4_XS", "Model-1B-IQ4_XS.gguf"),
        ("Q8_0", "Model-1B.Q8_0.gguf"),
        ("F16", "model_f16.gguf"),
        ("BF16", "BF16/Model-1B-BF16.gguf"),
        ("Model-1B-Q4_K_M", "Model-1B-Q4_K_M.gguf"),
        ("Model-1B.Q8_0.gguf", "Model-1B.Q8_0.gguf"),
    ],
)
def test_a_quantisation_names_one_file(quant: str, file: str) -> None:
    assert pick_gguf(FILES, quant) == file


@pytest.mark.parametrize(
    ("names", "quant", "words"),
    [
        (FILES, "Q4_K", "no GGUF file in it is Q4_K; there are: Model-1B-Q4_K_M.gguf, "),
        (FILES, "Q2_K", r"split into 2 parts; merge them \(llama-gguf-split --merge\)"),
        (FILES, "", "several GGUF files; name one after a colon, like :Model-1B-Q4_K_M: "),
        (["a-Q8_0.gguf", "b-Q8_0.gguf"], "Q8_0", "several GGUF files; .*: a-Q8_0.gguf, b-Q8_0.gguf$"),
        (["config.json", "mmproj.gguf"], "", "it has no GGUF file; drop --load-format gguf"),
    ],
)
def test_what_is_no_choice_lists_what_there_is(names: list[str], quant: str, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        pick_gguf(names, quant)


def test_a_lone_file_needs_no_name() -> None:
    assert pick_gguf(["mmproj-m.gguf", "m.gguf", "config.json"]) == "m.gguf"
