"""`prompt_embeds` of POST /v1/completions: base64 of tensors saved with torch.save."""

import base64
import io
import pickle
import re
import zipfile
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import msgspec
import openai
import pytest
import torch
from support.engines.fake_engine import MAX_LEN, WIDTH, build
from support.servers.live_server import LiveServer, live_server
from support.suite.rows import each_row

from pagoda.common.config.engine import EngineConfig
from pagoda.common.config.groups.model import ModelConfig
from pagoda.common.errors import RequestError
from pagoda.server.processing.prompt_embeds import from_array, from_base64

PATH = "/v1/completions"


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(engine={"enable_prompt_embeds": True}, enable_prompt_tokens_details=True) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: LiveServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def rows(text: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the embeddings that the fake model reads as this text."""
    values = torch.zeros(len(text), WIDTH, dtype=dtype)
    values[:, 0] = torch.tensor([float(ord(letter)) for letter in text])
    return values


def saved(value: Any, **options: Any) -> str:
    file = io.BytesIO()
    torch.save(value, file, **options)
    return base64.b64encode(file.getvalue()).decode()


@pytest.mark.field("CompletionRequest.prompt_embeds")
def test_the_output_continues_the_embeddings(server: LiveServer) -> None:
    body = {"prompt_embeds": saved(rows("abc")), "max_tokens": 4, "return_token_ids": True}
    status, answer = server.post(PATH, body)
    assert status == 200, answer
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("defg", "length")
    assert choice["prompt_token_ids"] == [0, 0, 0]
    assert answer["usage"]["prompt_tokens"] == 3
    assert answer["usage"]["total_tokens"] == 7


def test_choices_of_embeddings_precede_those_of_text(server: LiveServer) -> None:
    body = {"prompt_embeds": [saved(rows("a")), saved(rows("hi"))], "prompt": ["k", "x"], "max_tokens": 2, "n": 2}
    status, answer = server.post(PATH, body)
    assert status == 200, answer
    assert [choice["text"] for choice in answer["choices"]] == ["bc", "bc", "jk", "jk", "lm", "lm", "yz", "yz"]
    assert [choice["index"] for choice in answer["choices"]] == list(range(8))
    assert answer["usage"]["prompt_tokens"] == 5


@pytest.mark.parametrize("prompt", ["", None, []])
def test_the_official_client(client: openai.OpenAI, prompt: Any) -> None:
    given = {"prompt_embeds": saved(rows("abc", torch.bfloat16))}
    answer = client.completions.create(model="fake", prompt=prompt, max_tokens=3, extra_body=given)
    assert [choice.text for choice in answer.choices] == ["def"]
    pieces = list(
        client.completions.create(
            model="fake",
            prompt=prompt,
            max_tokens=3,
            stream=True,
            stream_options={"include_usage": True},
            extra_body=given,
        )
    )
    assert "".join(choice.text for piece in pieces for choice in piece.choices) == "def"
    assert pieces[-1].usage is not None
    assert pieces[-1].usage.prompt_tokens == 3


def test_equal_embeddings_are_cached_under_their_salt(server: LiveServer) -> None:
    def cached(text: str, salt: str) -> int:
        status, answer = server.post(PATH, {"prompt_embeds": saved(rows(text)), "max_tokens": 1, "cache_salt": salt})
        assert status == 200, answer
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert [cached("0123456789", salt) for salt in ("a", "a", "b")] == [0, 8, 0]
    assert cached("0123456x89", "a") == 4


@each_row(
    "value",
    [
        torch.nn.Parameter(rows("abc")),
        rows("zzabczz")[2:5],
        rows("abc").T.contiguous().T,
        rows("abc")[None],
        rows("abc", torch.float16),
        rows("abc", torch.float64),
    ],
    ids=["parameter", "slice", "transposed", "one-of-a-batch", "float16", "float64"],
)
@each_row("protocol", [2, 4])
def test_tensors_of_every_dtype_and_layout(server: LiveServer, value: torch.Tensor, protocol: int) -> None:
    body = {"prompt_embeds": saved(value, pickle_protocol=protocol), "max_tokens": 2}
    status, answer = server.post(PATH, body)
    assert status == 200, answer
    assert answer["choices"][0]["text"] == "de"


def spoiled(**changes: Any) -> str:
    """A saved tensor whose archive was rewritten. `data`, `pickle`: other contents; `compress`: deflated."""
    whole = zipfile.ZipFile(io.BytesIO(base64.b64decode(saved(rows("abc")))))
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED if changes.get("compress") else zipfile.ZIP_STORED) as archive:
        for name in whole.namelist():
            content = whole.read(name)
            if name.endswith("data.pkl"):
                content = changes.get("pickle", content)
            if name.endswith("data/0"):
                content = changes.get("data", content)
            archive.writestr(name, content)
        for number in range(changes.get("entries", 0)):
            archive.writestr(f"more/{number}", b"")
    return base64.b64encode(file.getvalue()).decode()


def described(shape: tuple[int, ...], strides: tuple[int, ...], offset: int = 0) -> bytes:
    """The pickle of a float32 tensor with the given shape, strides and offset."""

    class Described:
        def __reduce__(self) -> Any:
            return torch._utils._rebuild_tensor_v2, (Storage(), offset, shape, strides, False, {})

    class Storage:
        pass

    class Pickler(pickle.Pickler):
        def persistent_id(self, each: Any) -> Any:
            return ("storage", torch.FloatStorage, "0", "cpu", 12) if isinstance(each, Storage) else None

    file = io.BytesIO()
    Pickler(file, 2).dump(Described())
    return file.getvalue().replace(b"}", b")")  # no dictionary of hooks


def nested(depth: int) -> bytes:
    """A tuple, as a shape, that takes 2**depth steps to print or hash."""
    good = described((3, WIDTH), (WIDTH, 1))
    doubled = b")" + b"".join(
        b"q" + bytes([100 + level]) + b"h" + bytes([100 + level]) + b"\x86" for level in range(depth)
    )
    shape = b"K\x03K\x04\x86"
    assert shape in good
    return good.replace(shape, doubled, 1)


class Trap:
    def __reduce__(self) -> Any:
        return print, ("it ran",)


BAD: dict[str, tuple[Any, str]] = {
    "no base64": ("%%%", "it is not valid base64"),
    "nothing": ("", "not what torch.save writes"),
    "noise": (base64.b64encode(b"PK\3\4 and so on").decode(), "not what torch.save writes"),
    "numpy": (base64.b64encode(rows("abc").numpy().tobytes()).decode(), "not what torch.save writes"),
    "old format": (saved(rows("abc"), _use_new_zipfile_serialization=False), "not what torch.save writes"),
    "a list": (saved([rows("abc")]), "something else than one dense tensor"),
    "a state dict": (saved({"a": rows("abc")}), "something else than one dense tensor"),
    "sparse": (saved(rows("abc").to_sparse()), "something else than one dense tensor"),
    "sparse rows": (saved(rows("abc").to_sparse_csr()), "something else than one dense tensor"),
    "code": (spoiled(pickle=pickle.dumps(Trap())), "something else than one dense tensor"),
    "expanded": (saved(rows("a").expand(MAX_LEN - 1, WIDTH)), "repeats the values of a smaller storage"),
    "huge and empty": (spoiled(pickle=described((1 << 40, WIDTH), (0, 0))), "repeats the values of a smaller storage"),
    "beyond its storage": (spoiled(pickle=described((3, WIDTH), (WIDTH, 1), 1)), "reaches outside"),
    "strides beyond": (spoiled(pickle=described((3, WIDTH), (1 << 50, 1))), "reaches outside"),
    "negative": (spoiled(pickle=described((3, WIDTH), (-WIDTH, 1))), "corrupt"),
    "nested without end": (spoiled(pickle=nested(60)), "corrupt|not what torch.save writes"),
    "a memo of 32 GiB": (spoiled(pickle=b"\x80\x02K\x01r\xff\xff\xff\x7f."), "something else than one dense tensor"),
    "a long pickle": (spoiled(pickle=b"\x80\x02" + b"K\x010" * 5000 + b"."), "describes more than a tensor"),
    "zip bomb": (spoiled(data=bytes(1 << 24), compress=True), "compressed"),
    "many files": (spoiled(entries=100), "more files than a tensor has"),
    "cut off": (saved(rows("abc"))[: -4 * 20], "not what torch.save writes"),
    "integers": (saved(torch.zeros(3, WIDTH, dtype=torch.int64)), "must hold float32, bfloat16, float16 or float64"),
    "complex": (saved(torch.zeros(3, WIDTH, dtype=torch.complex64)), "something else"),
    "float8": (saved(torch.zeros(3, WIDTH).to(torch.float8_e4m3fn)), "not float8_e4m3fn"),
    "one row flat": (saved(torch.zeros(WIDTH)), rf"shape \[tokens, {WIDTH}\], not \[{WIDTH}\]"),
    "a batch": (saved(torch.zeros(2, 3, WIDTH)), rf"shape \[tokens, {WIDTH}\], not \[2, 3, {WIDTH}\]"),
    "too wide": (saved(torch.zeros(3, WIDTH + 1)), rf"shape \[tokens, {WIDTH}\], not \[3, {WIDTH + 1}\]"),
    "no rows": (saved(torch.zeros(0, WIDTH)), "it has no rows"),
    "too long": (saved(torch.zeros(MAX_LEN, WIDTH)), f"{MAX_LEN} rows, but the context is {MAX_LEN}"),
    "not a number": (saved(torch.full((3, WIDTH), float("nan"))), "not finite"),
    "infinite": (saved(torch.full((3, WIDTH), float("-inf"))), "not finite"),
    "too large": (saved(torch.full((3, WIDTH), 1e300, dtype=torch.float64)), "not finite in the model's float32"),
    "a number": (3, "string|list"),
    "a mixed list": ([saved(rows("a")), 3], "string"),
    "too many": ([""] * 4097, "at most 4096"),
}


@each_row("name", BAD)
def test_bad_embeddings_are_a_400_that_names_the_field(
    server: LiveServer, name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    value, words = BAD[name]
    status, answer = server.post(PATH, {"prompt_embeds": value, "max_tokens": 2})
    assert status == 400, answer
    assert answer["error"]["param"].startswith("prompt_embeds")
    assert "\n" not in answer["error"]["message"]
    assert len(answer["error"]["message"]) < 300
    assert re.search(words, answer["error"]["message"]), answer["error"]["message"]
    assert "it ran" not in capfd.readouterr().out


@each_row(
    ("field", "more"),
    [
        ("echo", {"echo": True}),
        ("prompt_logprobs", {"prompt_logprobs": 1}),
        ("prompt_embeds", {"use_beam_search": True, "n": 2, "temperature": 0}),
        ("n", {"n": 20000}),
        ("prompt", {"prompt": 3}),
    ],
)
def test_fields_that_need_prompt_tokens_are_refused(server: LiveServer, field: str, more: dict[str, Any]) -> None:
    status, answer = server.post(PATH, {"prompt_embeds": saved(rows("abc"))} | more)
    assert status == 400, answer
    assert answer["error"]["param"] == field


def test_embeddings_cannot_be_rendered(server: LiveServer) -> None:
    status, answer = server.post(f"{PATH}/render", {"prompt_embeds": saved(rows("abc"))})
    assert (status, answer["error"]["param"]) == (400, "prompt_embeds")


def test_embeddings_need_the_flag() -> None:
    with live_server() as server:
        status, answer = server.post(PATH, {"prompt_embeds": "%%%"})
        assert (status, answer["error"]["param"]) == (400, "prompt_embeds")
        assert "start the server with --enable-prompt-embeds" in answer["error"]["message"]


@each_row("model", ["float32", "bfloat16", "float16"])
@each_row("given", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_embeddings_are_converted_to_the_model_dtype(model: str, given: torch.dtype) -> None:
    built = build(EngineConfig(model=ModelConfig(model="fake", enable_prompt_embeds=True)))
    info = msgspec.structs.replace(built.info, dtype=model)
    values = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(0)).to(given)
    wanted = values.float().to(getattr(torch, model)).view(torch.uint8).numpy().tobytes()
    turned = values.T.contiguous().T
    assert from_base64(saved(turned), info).rows == wanted
    arrays = [turned, values.double().numpy()]
    if given is torch.bfloat16:
        arrays.append(values.float().numpy().astype(ml_dtypes.bfloat16))
    for array in arrays:
        assert from_array(array, info).rows == wanted
        for wrong in (float("nan"), float("inf")):
            spoilt = array.clone() if isinstance(array, torch.Tensor) else array.copy()
            spoilt[1, 2] = wrong
            with pytest.raises(RequestError, match=f"not finite in the model's {model}"):
                from_array(spoilt, info)
