import json
import subprocess
import sys
from typing import Any, Literal

import pytest
import tokenizers
from support.checkpoints.tiny_encoder import WORDS, word_pieces
from support.suite.rows import each_row
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

from pagoda.common.engine.structured_output.grammar import vocabulary_of
from pagoda.common.errors import ModelError, RequestError
from pagoda.common.text import tokenizer
from pagoda.common.text.tokenizer import GIL_RELEASE_CHARS, Detokenizer, Tokenizer, load_tokenizer
from pagoda.server.processing.inputs import bad_words_token_ids
from pagoda.server.vllm.tokenizer_view import HfTokenizer

TEXTS = [
    "",
    " ",
    "Hello world, hello again",
    "  two  spaces   three\t tab\n\nlines \n",
    "if x == 10_000:\n    return [a['b'] for a in c]",
    "12345 3.14 ½ ² ٣",
    "Grüße aus Zürich, naïve café — “quotes” …",
    "日本語のテキスト 中文 한국어 עברית العربية",
    "emoji 👩‍👩‍👧 🏳️‍🌈 🤷🏽‍♀️ \u200b zero",
    "<s> a special </s> in text <tool>",
    "don't can't we'll I'M",
    "\x00\x01\x7f control",
]


@pytest.fixture(scope="module")
def backend():
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=["<s>", "</s>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    made.train_from_iterator(TEXTS * 3, trainer)
    return made


@pytest.fixture
def folder(backend, tmp_path):
    backend.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def with_ends(folder):
    """The tokenizer.json of `folder` adds bos and eos."""
    path = folder / "tokenizer.json"
    made = tokenizers.Tokenizer.from_file(str(path))
    made.post_processor = processors.TemplateProcessing("<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)])
    made.save(str(path))
    return folder


def configure(folder, **config):
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def transformers_of(folder):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def added(content, **rules):
    plain = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False, "special": True}
    return {"content": content, **plain, **rules}


@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"add_bos_token": True},
        {"add_eos_token": True},
        {"add_bos_token": True, "add_eos_token": True},
        {"add_bos_token": False, "pad_token": "<pad>"},
        {"bos_token": {"__type": "AddedToken", **added("<s>", lstrip=True)}, "extra_special_tokens": ["<tool>"]},
        {"added_tokens_decoder": {"600": added("<tool>", special=False), "601": added("<x>")}, "add_bos_token": True},
    ],
    ids=lambda config: "-".join(config) or "plain",
)
def test_same_ids_and_text_as_transformers(folder, config, ends):
    configure(with_ends(folder) if ends else folder, **config)
    ours, theirs = load_tokenizer(folder), transformers_of(folder)
    for text in TEXTS:
        for special in (True, False):
            ids = ours.encode(text, add_special_tokens=special)
            assert ids == theirs(text, add_special_tokens=special)["input_ids"]
            for skip in (True, False):
                assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)
    assert (ours.bos_token_id, ours.eos_token_id) == (theirs.bos_token_id, theirs.eos_token_id)
    assert ours.pad_token_id == theirs.pad_token_id
    assert ours.vocab_size == len(theirs)
    assert ours.special_ids >= set(theirs.all_special_ids)


def test_truncation_and_padding_in_the_file_do_not_apply(backend, tmp_path):
    twin = tokenizers.Tokenizer.from_str(backend.to_str())
    twin.enable_truncation(2)
    twin.enable_padding(length=9)
    twin.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path).encode(TEXTS[2]) == backend.encode(TEXTS[2]).ids


def test_vocabulary_with_merges(backend, tmp_path):
    backend.model.save(str(tmp_path))
    configure(tmp_path, tokenizer_class="GPT2Tokenizer", add_bos_token=True)
    ours, theirs = load_tokenizer(tmp_path), transformers_of(tmp_path)
    for text in TEXTS:
        assert ours.encode(text) == theirs(text)["input_ids"]
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs(text)["input_ids"], skip_special_tokens=True)


def test_chat_templates(folder):
    assert load_tokenizer(configure(folder)).chat_template is None
    assert load_tokenizer(configure(folder, chat_template="in config")).chat_template == "in config"
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    assert load_tokenizer(configure(folder, chat_template=named)).chat_template == "d"
    assert load_tokenizer(configure(folder, chat_template=named)).chat_templates["tool_use"] == "t"
    (folder / "chat_template.json").write_text('{"chat_template": "in json"}')
    assert load_tokenizer(configure(folder)).chat_template == "in json"
    (folder / "chat_template.jinja").write_text("in a file\n")
    assert load_tokenizer(configure(folder, chat_template="in config")).chat_template == "in a file\n"


def test_special_tokens_come_from_their_map_too(folder):
    (folder / "special_tokens_map.json").write_text('{"eos_token": {"content": "</s>"}}')
    assert load_tokenizer(folder).special_tokens == {"eos_token": "</s>"}


def test_ordinary_encoding_does_not_parse_special_tokens(folder):
    ours = load_tokenizer(configure(with_ends(folder)))
    text = "a </s> b"
    assert ours.eos_token_id in ours.encode(text)
    ids = ours.encode_ordinary(text)
    assert not ours.special_ids & set(ids)
    assert ours.decode(ids) == text
    assert ours.eos_token_id in ours.encode(text)


def test_added_tokens_beyond_the_models_vocabulary_are_ordinary_text(folder):
    """Gemma 3's tokenizer.json adds the placeholder of an image one past the vocabulary of its text models."""
    wide = load_tokenizer(configure(with_ends(folder), additional_special_tokens=["<inside>", "<image_soft_token>"]))
    size = wide.vocab_size - 1
    text = "a<image_soft_token> <inside>b"
    assert max(wide.encode(text)) == size
    fitted = wide.with_vocab(size)
    ids = fitted.encode(text)
    assert max(ids) < size
    assert wide.backend.token_to_id("<inside>") in ids
    assert (ids[0], ids[-1]) == (wide.bos_token_id, wide.eos_token_id) == (fitted.bos_token_id, fitted.eos_token_id)
    assert fitted.decode(ids) == "a<image_soft_token> b"
    assert max(fitted.encode_ordinary(text)) < size
    assert max(fitted.encode_pair(text, text)[0]) < size
    assert fitted.vocab_size == size
    for plain in TEXTS:
        assert fitted.encode(plain) == wide.encode(plain)
    assert wide.with_vocab(size + 1) is wide
    assert wide.with_vocab(10**6) is wide


def test_a_tokenizer_of_another_model_is_refused(folder):
    ours = load_tokenizer(with_ends(folder))
    size = ours.vocab_size
    with pytest.raises(ModelError, match=f"has ids up to {size - 1}, .* {size - 1} entries; name .* --tokenizer"):
        ours.with_vocab(size - 1)
    ends = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    ends.add_special_tokens(["<end>"])
    ends.post_processor = processors.TemplateProcessing("$A <end>", special_tokens=[("<end>", size)])
    ends.save(str(folder / "tokenizer.json"))
    with pytest.raises(ModelError, match=f"has ids up to {size}"):
        load_tokenizer(folder).with_vocab(size)


def test_tokens_one_by_one(folder):
    ours = load_tokenizer(folder)
    ids = ours.encode("Grüße 日本 👩‍👩‍👧")
    assert b"".join(map(ours.token_bytes, ids)).decode() == "Grüße 日本 👩‍👩‍👧"
    assert ours.token_text(ours.backend.token_to_id("</s>")) == "</s>"
    assert ours.token_text(ours.backend.token_to_id("Ã")) == "\ufffd"
    assert ours.token_bytes(10**6) == ours.token_bytes(-1) == ours.token_bytes(10**30) == b""


LETTERS = "ÀÁõö÷øùúûüýþÿ"
"""Characters that byte-level vocabularies have for bytes which no text has; DeepSeek-LLM adds them as tokens."""


@pytest.mark.parametrize("in_vocabulary", [True, False])
def test_added_letters_stand_for_themselves(backend, tmp_path, in_vocabulary):
    made = tokenizers.Tokenizer.from_str(backend.to_str())
    if not in_vocabulary:
        state = json.loads(made.to_str())
        vocab = {token: id for token, id in state["model"]["vocab"].items() if token not in LETTERS}
        state["model"] |= {"vocab": {token: number for number, token in enumerate(vocab)}, "merges": []}
        state["added_tokens"] = []
        made = tokenizers.Tokenizer.from_str(json.dumps(state))
        made.add_special_tokens(["<s>", "</s>"])
    made.add_tokens([AddedToken(letter, normalized=False) for letter in LETTERS])
    made.save(str(tmp_path / "tokenizer.json"))
    ours = load_tokenizer(tmp_path)
    text = "für schön über, À la ø"
    ids = ours.encode(text)
    assert {made.token_to_id(letter) for letter in "üöÀø"} <= set(ids)
    assert ours.decode(ids) == text
    assert "".join(map(ours.token_text, ids)) == text
    hf = HfTokenizer(ours)
    assert hf.decode(ids) == hf.convert_tokens_to_string(hf.tokenize(text)) == text
    words = vocabulary_of(ours, ours.vocab_size, [made.token_to_id("</s>")])
    assert words.tokens[made.token_to_id("ü")] == "ü".encode()  # what token masks know
    detokenizer = Detokenizer(ours, [], stop=["ön ü"])
    assert detokenizer.append(ids, True) == "für sch"


def test_added_tokens_that_the_vocabulary_has_stand_for_its_bytes(backend, tmp_path):
    """Such as "\u0120" for a space: the model's own tokens have them, too."""
    made = tokenizers.Tokenizer.from_str(backend.to_str())
    made.add_tokens([AddedToken("Ġ"), AddedToken("Ã")])
    made.save(str(tmp_path / "tokenizer.json"))
    ours = load_tokenizer(tmp_path)
    assert ours.token_bytes(made.token_to_id("Ġ")) == b" "
    assert ours.token_bytes(made.token_to_id("Ã")) == b"\xc3"


def test_lone_surrogates_raise_request_error(folder):
    with pytest.raises(RequestError) as caught:
        load_tokenizer(folder).encode("a\ud800b")
    assert caught.value.field == "prompt"


def sentencepiece_like(strip=True):
    """A small byte-fallback vocabulary in the layout of Llama 2's tokenizer.json."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "a", "b", "c", "▁a", "ab", "▁ab", "é"]
    merges = [("▁", "a"), ("a", "b"), ("▁a", "b")]
    made = tokenizers.Tokenizer(
        models.BPE(
            {piece: i for i, piece in enumerate(pieces)}, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True
        )
    )
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    made.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in ("<s>", "</s>")])
    return made


def test_byte_fallback(tmp_path):
    sentencepiece_like().save(str(tmp_path / "tokenizer.json"))
    ours = load_tokenizer(configure(tmp_path))
    ids = ours.encode("ab é 日本")
    assert ours.decode(ids) == "ab é 日本"
    assert [ours.token_bytes(i) for i in ours.encode(" ab", add_special_tokens=False)] == [b" ", b" ab"]
    assert ours.token_bytes(3 + 0xE6) == b"\xe6"


def test_spaces_between_special_tokens(tmp_path):
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens(["<s>", "</s>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    ours = load_tokenizer(tmp_path)
    ids = [0, 2, 3, 1, 2]
    assert ours.byte_table is None
    assert ours.decode(ids, False) == "a <s> </s> b <s>"
    assert ours.decode(ids, False, spaces_between_special_tokens=False) == "a <s></s> b <s>"
    assert ours.decode(ids) == "a b"


def test_bad_words_at_the_start_and_after_a_space(folder):
    ours = load_tokenizer(configure(with_ends(folder)))
    expected = [ours.encode("world", False), ours.encode(" world", False)]
    assert bad_words_token_ids(["world"], ours) == expected
    assert bad_words_token_ids(["world", " world", "world"], ours) == expected


@each_row(
    ("files", "message"),
    [
        ({}, "tokenizer.json is missing"),
        ({"tokenizer.json": "{"}, "tokenizer.json: cannot be read"),
        ({"tokenizer.json": "[]"}, "tokenizer.json: cannot be read"),
        ({"tokenizer.model": "x"}, "has tokenizer.model but no tokenizer.json.*save_pretrained"),
        ({"vocab.json": "{}", "merges.txt": "", "tokenizer_config.json": '{"tokenizer_class": "X"}'}, "vocab.json"),
        ({"vocab.json": "{", "merges.txt": ""}, "vocab.json and merges.txt cannot be read"),
        ({"tokenizer_config.json": "{"}, "tokenizer_config.json: cannot be read"),
        ({"tokenizer_config.json": "[]"}, "tokenizer_config.json: is not a JSON object"),
    ],
)
def test_unusable_folders_are_rejected_with_the_reason(tmp_path, files, message):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ModelError, match=message) as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_file_of_another_kind_is_rejected(tmp_path):
    (tmp_path / "model.bin").write_text("x")
    with pytest.raises(ModelError, match="not a tokenizer"):
        load_tokenizer(tmp_path / "model.bin")
    with pytest.raises(ModelError, match="no such file"):
        load_tokenizer(tmp_path / "nowhere")


def test_a_tokenizer_json_by_name(folder):
    assert load_tokenizer(folder / "tokenizer.json").encode("Hello") == load_tokenizer(folder).encode("Hello")


def test_transformers_is_not_imported(folder):
    code = (
        "import sys; from pagoda.common.text import chat_template; from pagoda.common.text.tokenizer "
        "import load_tokenizer; load_tokenizer(sys.argv[1]).encode('x'); "
        "print([m for m in ('transformers', 'torch', 'huggingface_hub') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("text", ["Hello world, <s> again ", "日本語 ", "a"])
def test_long_texts_are_tokenised_without_the_gil(folder, text, monkeypatch):
    tokenizer = load_tokenizer(folder)
    text = text * (GIL_RELEASE_CHARS // len(text) + 1)
    for special in (False, True):
        ids = tokenizer.backend.encode(text, add_special_tokens=special).ids
        with monkeypatch.context() as patch:
            patch.setattr(tokenizers.Tokenizer, "encode", None)  # it does not release the GIL
            assert tokenizer.encode(text, special) == ids
    with pytest.raises(RequestError, match=r"surrogate|UTF-8"):
        tokenizer.encode(text + "\ud800")


TOKENIZER = Tokenizer(word_pieces())


def words(ids: list[int]) -> str:
    return " ".join(WORDS[id] for id in ids)


def test_pairs_are_joined_by_the_tokenizer():
    ids, second = TOKENIZER.encode_pair("the cats", "a dog")
    assert words(ids) == "[CLS] the cat ##s [SEP] a dog [SEP]"
    assert second == 5


def test_encode_within_of_one_text_equals_encode():
    assert TOKENIZER.encode_within(None, "the cat") == (TOKENIZER.encode("the cat"), None)


@each_row(
    ("limit", "texts", "side", "kept"),
    [
        (5, ("a b c d e",), "right", "[CLS] a b c [SEP]"),
        (5, ("a b c d e",), "left", "[CLS] c d e [SEP]"),
        (7, ("a b c d e",), "right", "[CLS] a b c d e [SEP]"),
        (1, ("a b",), "right", "[CLS] [SEP]"),
        (8, ("a b c d e f", "x y"), "right", "[CLS] a b c [SEP] [UNK] [UNK] [SEP]"),
        (8, ("x", "a b c d e f"), "left", "[CLS] [UNK] [SEP] c d e f [SEP]"),
        (8, ("a b c d", "e f g h"), "right", "[CLS] a b [SEP] e f g [SEP]"),
        (8, ("a b c d e", "e f g h"), "right", "[CLS] a b c [SEP] e f [SEP]"),
        (3, ("a", "b"), "right", "[CLS] [SEP] [SEP]"),
    ],
)
def test_truncation_keeps_special_tokens(limit: int, texts: tuple[str, ...], side: Literal["left", "right"], kept: str):
    ids, _ = TOKENIZER.encode_within(limit, *texts, side=side)
    assert words(ids) == kept


@pytest.mark.parametrize("text", ["\ud800", "a\udfff"])
def test_surrogates_in_a_pair_are_rejected(text: Any):
    with pytest.raises(RequestError, match=r"surrogate|UTF-8"):
        TOKENIZER.encode_pair("a", text)


class PanicException(BaseException):
    """As the library's: no Exception, and known by its name alone."""


@pytest.mark.parametrize(
    ("raised", "expected", "message"),
    [
        (Exception("no <unk>"), RequestError, "the model's tokenizer cannot encode the text: no <unk>"),
        (PanicException("out of range"), ModelError, "files contradict themselves"),
        (KeyboardInterrupt("stop"), KeyboardInterrupt, "stop"),
    ],
)
def test_errors_of_the_library(raised: BaseException, expected: type[BaseException], message: str) -> None:
    class Backend:
        def encode(self, text: str, add_special_tokens: bool) -> None:
            raise raised

    with pytest.raises(expected, match=message):
        tokenizer._encoding(Backend(), "a")
