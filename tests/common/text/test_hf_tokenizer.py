"""The tokenizer that scripts get, beside transformers' on the same vocabulary."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.checkpoints.byte_text import byte_tokenizer
from support.suite.rows import each_row

from pagoda.common.errors import RequestError
from pagoda.server.vllm.tokenizer_view import HfTokenizer

transformers = pytest.importorskip("transformers")

TEMPLATE = (
    "{{ bos_token or '' }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if tools %}({{ tools[0].function.name }}){% endif %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
TEXT = replace(
    byte_tokenizer(),
    special_tokens={"eos_token": "<eos>", "pad_token": "<eos>", "bos_token": "<eos>"},
    chat_templates={"default": TEMPLATE},
)
OURS = HfTokenizer(TEXT, "fake", 32)
THEIRS = transformers.PreTrainedTokenizerFast(
    tokenizer_object=TEXT.backend,
    eos_token="<eos>",
    pad_token="<eos>",
    bos_token="<eos>",
    chat_template=TEMPLATE,
    model_max_length=32,
)
MESSAGES = [{"role": "user", "content": "Is 7 odd?"}, {"role": "assistant", "content": "Yes"}]
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]


@each_row(
    ("method", "args", "options"),
    [
        ("encode", ("héllo <eos>",), {}),
        ("encode", ("héllo",), {"add_special_tokens": False}),
        ("encode", ("abcdef",), {"truncation": True, "max_length": 3}),
        ("encode", ("abcdef" * 9,), {"truncation": True}),
        ("decode", ([104, 105, 256],), {}),
        ("decode", ([104, 105, 256],), {"skip_special_tokens": True}),
        ("decode", (104,), {}),
        ("batch_decode", ([[104, 256], [105]],), {"skip_special_tokens": True}),
        ("tokenize", ("a b",), {}),
        ("convert_ids_to_tokens", (97,), {}),
        ("convert_ids_to_tokens", ([97, 256],), {}),
        ("convert_ids_to_tokens", ([97, 256],), {"skip_special_tokens": True}),
        ("convert_tokens_to_ids", ("<eos>",), {}),
        ("convert_tokens_to_ids", (["a", "<eos>"],), {}),
        ("convert_tokens_to_string", (["a", "b"],), {}),
        ("get_vocab", (), {}),
        ("get_added_vocab", (), {}),
        ("apply_chat_template", (MESSAGES,), {"tokenize": False}),
        ("apply_chat_template", (MESSAGES,), {"tokenize": False, "add_generation_prompt": True, "tools": TOOLS}),
        ("apply_chat_template", ([MESSAGES, MESSAGES[:1]],), {"tokenize": False}),
        ("apply_chat_template", (MESSAGES,), {"return_dict": False}),
        ("apply_chat_template", (MESSAGES,), {"return_dict": True}),
        (
            "apply_chat_template",
            (MESSAGES,),
            {"tokenize": False, "chat_template": "{{ messages[0].content }}{{ x }}", "x": 4},
        ),
        ("apply_chat_template", (MESSAGES,), {"tokenize": False, "continue_final_message": True}),
        ("__call__", ("abc",), {}),
        ("__call__", (["abc", "d"],), {}),
        ("__call__", (["abc", "d"],), {"padding": True}),
        ("__call__", (["abc", "d"],), {"padding": "max_length", "max_length": 5}),
        ("__call__", (["abc", "d"],), {"return_attention_mask": False}),
        ("__call__", ("abc",), {"return_offsets_mapping": True}),
        ("__call__", ("abc", "de"), {"truncation": True, "max_length": 4}),
        ("__len__", (), {}),
    ],
)
def test_methods_return_what_transformers_return(method: str, args: tuple[Any, ...], options: dict[str, Any]) -> None:
    ours, theirs = (getattr(each, method)(*args, **options) for each in (OURS, THEIRS))
    if hasattr(theirs, "keys"):
        theirs = {key: theirs[key] for key in theirs if key != "token_type_ids"}
    assert ours == theirs


def test_attributes() -> None:
    names = ("vocab_size", "eos_token", "eos_token_id", "bos_token_id", "pad_token", "pad_token_id", "unk_token")
    names += ("all_special_tokens", "all_special_ids", "chat_template", "is_fast", "model_max_length", "padding_side")
    assert {name: getattr(OURS, name) for name in names} == {name: getattr(THEIRS, name) for name in names}
    assert OURS(["a"]).input_ids == OURS(["a"])["input_ids"]
    with pytest.raises(AttributeError, match="nothing"):
        _ = OURS(["a"]).nothing


def test_padding_on_the_left() -> None:
    ours = HfTokenizer(TEXT)
    ours.padding_side = "left"
    assert ours(["ab", "c"], padding=True).attention_mask == [[1, 1], [0, 1]]


def test_tensors() -> None:
    assert torch.equal(OURS.encode("ab", return_tensors="pt"), torch.tensor([[97, 98]]))
    np.testing.assert_array_equal(OURS(["ab", "cd"], return_tensors="np").input_ids, [[97, 98], [99, 100]])
    assert OURS.decode(torch.tensor([97, 98])) == "ab"
    with pytest.raises(ValueError, match="padding=True"):
        OURS(["ab", "c"], return_tensors="pt")


def test_it_can_be_awaited() -> None:
    async def get() -> HfTokenizer:
        return await OURS

    assert asyncio.run(get()) is OURS


def test_saved_files_are_read_again(tmp_path: Path) -> None:
    OURS.save_pretrained(str(tmp_path / "folder"))
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "folder").encode("ab") == [97, 98]


def test_a_model_without_a_template_is_refused() -> None:
    with pytest.raises(RequestError, match="no chat template"):
        HfTokenizer(replace(TEXT, chat_templates={})).apply_chat_template(MESSAGES)


def test_transformers_is_not_imported() -> None:
    code = "import sys, pagoda.server.vllm.tokenizer_view; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
