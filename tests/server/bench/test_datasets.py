"""Datasets of the benchmarks: their prompts, lengths and order follow from the settings and the seed."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.checkpoints.byte_text import EOS, byte_tokenizer, framed_tokenizer

from pagoda.common.config.groups.bench.dataset import DatasetConfig
from pagoda.common.config.settings import build, table
from pagoda.common.errors import ConfigError
from pagoda.server.bench.datasets.draw import draw_samples
from pagoda.server.bench.datasets.samples import DatasetSample, PromptVocabulary
from pagoda.server.settings.flags import FlagParser, add_settings, resolve_flags

SETTINGS = table(DatasetConfig)
TEXT = byte_tokenizer()


def config(*words: str) -> DatasetConfig:
    parser = FlagParser(prog="bench")
    add_settings(parser, SETTINGS.values())
    result = build(DatasetConfig, resolve_flags(parser.parse_args(words), SETTINGS))
    return result


def drawn(*words: str, as_text: bool = False, seed: int = 0, tokenizer: Any = TEXT) -> list[DatasetSample]:
    vocabulary = PromptVocabulary.of(tokenizer, as_text=as_text)
    return draw_samples(config(*words), vocabulary, np.random.default_rng(seed))


def write(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


# --- random ---


@pytest.mark.setting("--num-prompts", "--random-input-len", "--random-output-len", "--random-prefix-len")
def test_random_prompts() -> None:
    words = ["--num-prompts", "20", "--random-input-len", "7", "--random-prefix-len", "5", "--random-output-len", "3"]
    samples = drawn(*words)
    assert [sample.prompt_len for sample in samples] == [12] * 20
    assert {sample.output_len for sample in samples} == {3}
    assert len({tuple(sample.token_ids[:5]) for sample in samples}) == 1
    assert len({tuple(sample.token_ids[5:]) for sample in samples}) == 20
    assert all(token != EOS for sample in samples for token in sample.token_ids)
    assert drawn(*words, seed=1) == drawn(*words, seed=1) != drawn(*words, seed=2)


@pytest.mark.setting("--random-range-ratio")
@pytest.mark.parametrize(
    ("ratio", "inputs", "outputs"),
    [("0.5", (5, 15), (50, 150)), ('{"input": 0.5}', (5, 15), (100, 100)), ('{"output": 0.1}', (10, 10), (90, 110))],
)
def test_lengths_vary_within_their_range(ratio: str, inputs: tuple[int, int], outputs: tuple[int, int]) -> None:
    words = ["--num-prompts", "300", "--random-input-len", "10", "--random-output-len", "100"]
    samples = drawn(*words, "--random-range-ratio", ratio)
    for lengths, (least, most) in (
        ([sample.prompt_len for sample in samples], inputs),
        ([sample.output_len for sample in samples], outputs),
    ):
        assert least == min(lengths)
        assert most == max(lengths)


@pytest.mark.setting("--input-len", "--output-len")
def test_general_lengths_take_precedence() -> None:
    (sample,) = drawn("--num-prompts", "1", "--input-len", "4", "--output-len", "6", "--random-input-len", "99")
    assert (sample.prompt_len, sample.output_len) == (4, 6)


def test_prompts_as_text_have_their_length_with_what_the_server_adds() -> None:
    for sample in drawn("--num-prompts", "9", "--random-input-len", "40", as_text=True, tokenizer=framed_tokenizer()):
        assert len(framed_tokenizer().encode(sample.text)) == sample.prompt_len == 40
        assert TEXT.decode(sample.token_ids) == sample.text


def test_a_vocabulary_without_a_tokenizer() -> None:
    vocabulary = PromptVocabulary(50, special=frozenset({3}))
    samples = draw_samples(config("--num-prompts", "5", "--input-len", "99"), vocabulary, np.random.default_rng(0))
    assert {token for sample in samples for token in sample.token_ids} <= set(range(50)) - {3}
    with pytest.raises(ConfigError, match="needs a tokenizer"):
        draw_samples(config("--dataset-name", "sonnet"), vocabulary, np.random.default_rng(0))


@pytest.mark.setting("--random-batch-size")
def test_batches_and_documents() -> None:
    (batch,) = drawn("--num-prompts", "1", "--input-len", "4", "--random-batch-size", "3", as_text=True)
    assert (len(batch.more), batch.prompt_len) == (2, 12)
    words = ["--dataset-name", "random-rerank", "--random-batch-size", "3", "--num-prompts", "2"]
    ranked = drawn(*words, "--input-len", "4", as_text=True)
    assert [(len(each.more), each.prompt_len) for each in ranked] == [(3, 16)] * 2


# --- shared prefixes, verses, conversations ---


@pytest.mark.setting("--prefix-repetition-prefix-len", "--prefix-repetition-suffix-len")
@pytest.mark.setting("--prefix-repetition-num-prefixes", "--prefix-repetition-output-len", "--disable-shuffle")
def test_prefix_repetition() -> None:
    words = ["--dataset-name", "prefix_repetition", "--num-prompts", "12", "--prefix-repetition-prefix-len", "6"]
    words += ["--prefix-repetition-suffix-len", "2", "--prefix-repetition-num-prefixes", "3"]
    samples = drawn(*words, "--prefix-repetition-output-len", "5")
    prefixes = [tuple(sample.token_ids[:6]) for sample in samples]
    assert sorted(Counter(prefixes).values()) == [4, 4, 4]
    assert {(sample.prompt_len, sample.output_len) for sample in samples} == {(8, 5)}
    ordered = [tuple(sample.token_ids[:6]) for sample in drawn(*words, "--disable-shuffle")]
    assert ordered == [ordered[0]] * 4 + [ordered[4]] * 4 + [ordered[8]] * 4
    assert prefixes != ordered


@pytest.mark.setting("--sonnet-input-len", "--sonnet-output-len", "--sonnet-prefix-len")
def test_sonnet(tmp_path: Path) -> None:
    poem = tmp_path / "poem.txt"
    poem.write_text("\n".join(f"line {index:02} of a poem" for index in range(40)))  # 18 tokens each
    words = ["--dataset-name", "sonnet", "--num-prompts", "5", "--sonnet-input-len", "180", "--sonnet-prefix-len", "36"]
    samples = drawn(*words, "--sonnet-output-len", "7", "--dataset-path", str(poem))
    for sample in samples:
        _, *lines = sample.text.splitlines()
        assert len(lines) == 180 // 18
        assert lines[:2] == ["line 00 of a poem", "line 01 of a poem"]
        assert sample.output_len == 7
        assert sample.prompt_len == len(sample.text)
    assert len({sample.text for sample in samples}) == 5
    made_up = drawn(*words)
    assert 100 < made_up[0].prompt_len < 320


@pytest.mark.setting("--multi-turn-num-turns", "--multi-turn-input-len", "--multi-turn-output-len")
@pytest.mark.setting("--multi-turn-prefix-len")
def test_conversations() -> None:
    words = ["--dataset-name", "multi_turn", "--num-prompts", "6", "--multi-turn-num-turns", "3"]
    words += ["--multi-turn-input-len", "4", "--multi-turn-output-len", "9", "--multi-turn-prefix-len", "5"]
    samples = drawn(*words)
    assert [sample.follows for sample in samples] == [None, None, 0, 1, 2, 3]
    assert [sample.prompt_len for sample in samples] == [9, 9, 4, 4, 4, 4]
    assert samples[0].token_ids[:5] == samples[1].token_ids[:5]
    assert {sample.output_len for sample in samples} == {9}


# --- files ---


def conversation(*messages: str) -> dict[str, Any]:
    return {"conversations": [{"from": "human", "value": message} for message in messages]}


@pytest.mark.setting("--dataset-name", "--dataset-path", "--sharegpt-output-len", "--no-oversample")
def test_sharegpt(tmp_path: Path) -> None:
    file = tmp_path / "s.json"
    usable = [conversation("question one", "answer"), conversation("question two", "a long answer")]
    unusable = [conversation("ab", "too short a question"), conversation("an answer of a letter", "a"), {"id": 1}]
    file.write_text(json.dumps([*unusable, *usable, conversation("x" * 1025, "a long question"), conversation("one")]))
    words = ["--dataset-name", "sharegpt", "--dataset-path", str(file), "--num-prompts", "5"]
    samples = drawn(*words, "--no-oversample")
    assert sorted((sample.text, sample.output_len) for sample in samples) == [("question one", 6), ("question two", 13)]
    assert len(drawn(*words)) == 5
    ordered = drawn(*words, "--disable-shuffle", "--sharegpt-output-len", "3")
    assert [sample.text for sample in ordered[:3]] == ["an answer of a letter", "question one", "question two"]
    assert {sample.output_len for sample in ordered} == {3}


def test_turns_of_sharegpt(tmp_path: Path) -> None:
    file = tmp_path / "s.json"
    file.write_text(json.dumps([conversation("a", "A", "b", "B", "c", "C"), conversation("d", "D")]))
    words = ["--dataset-name", "multi_turn", "--dataset-path", str(file), "--num-prompts", "5", "--disable-shuffle"]
    samples = drawn(*words, "--multi-turn-num-turns", "2")
    assert [sample.text for sample in samples] == ["a", "b", "d", "a", "b"]
    assert [sample.follows for sample in samples] == [None, 0, None, None, 3]


@pytest.mark.setting("--custom-output-len", "--skip-chat-template", "--chat-template-kwargs")
def test_custom(tmp_path: Path) -> None:
    file = write(tmp_path / "c.jsonl", [{"prompt": "one", "output_tokens": 4}, {"prompt": "two", "output_tokens": 5}])
    words = ["--dataset-name", "custom", "--dataset-path", file, "--num-prompts", "2", "--disable-shuffle"]
    plain = drawn(*words, "--skip-chat-template")
    assert [(sample.text, sample.output_len) for sample in plain] == [("one", 256), ("two", 256)]
    rendered = drawn(*words, "--custom-output-len", "-1")
    assert [(s.text, s.output_len) for s in rendered] == [("user: one;assistant:", 4), ("user: two;assistant:", 5)]
    open_ended = drawn(*words, "--chat-template-kwargs.add_generation_prompt", "false", "--custom-output-len", "9")
    assert [(s.text, s.output_len) for s in open_ended] == [("user: one;", 9), ("user: two;", 9)]
    shuffled = [tuple(s.text for s in drawn(*words[:-1], "--skip-chat-template", seed=seed)) for seed in range(9)]
    assert set(shuffled) == {("one", "two"), ("two", "one")}


@pytest.mark.setting("--spec-bench-output-len", "--spec-bench-category")
def test_spec_bench(tmp_path: Path) -> None:
    rows = [{"category": "math", "turns": ["1+1", "2+2"]}, {"category": "writing", "turns": ["a poem"]}]
    words = ["--dataset-name", "spec_bench", "--dataset-path", write(tmp_path / "q.jsonl", rows), "--num-prompts", "2"]
    words += ["--skip-chat-template"]
    assert {sample.text for sample in drawn(*words)} == {"1+1", "a poem"}
    samples = drawn(*words, "--spec-bench-category", "math", "--spec-bench-output-len", "8")
    assert [(sample.text, sample.output_len) for sample in samples] == [("1+1", 8)] * 2
    with pytest.raises(ConfigError, match=r"--spec-bench-category: .* has no music"):
        drawn(*words, "--spec-bench-category", "music")


def test_burstgpt(tmp_path: Path) -> None:
    file = tmp_path / "b.csv"
    rows = ["5,ChatGPT,9,9,18,x", "6.5,GPT-4,7,3,10,x", "7,GPT-4,8,0,8,x", "9,GPT-4,2,4,6,x"]
    file.write_text("\n".join(["Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type", *rows]))
    words = ["--dataset-name", "burstgpt", "--dataset-path", str(file), "--num-prompts", "9"]
    samples = drawn(*words, "--no-oversample")
    assert [(s.arrival, s.prompt_len, s.output_len) for s in samples] == [(0.0, 7, 3), (2.5, 2, 4)]
    repeated = drawn(*words)
    assert len(repeated) == 9
    assert [sample.arrival for sample in repeated] == sorted(sample.arrival or 0.0 for sample in repeated)


@pytest.mark.setting("--timed-trace-chunk-hash-size", "--timed-trace-sec-multiplier", "--timed-trace-label-hash-ids")
@pytest.mark.setting("--timed-trace-label-timestamp", "--timed-trace-label-input-length")
@pytest.mark.setting("--timed-trace-label-output-length")
def test_timed_trace(tmp_path: Path) -> None:
    usual = [
        {"timestamp": 1000, "input_length": 6, "output_length": 2, "hash_ids": [1, 2]},
        {"timestamp": 1500, "input_length": 9, "output_length": 3, "hash_ids": [1, 2, 5]},
        {"timestamp": 1600, "input_length": 7, "output_length": 3},
    ]
    words = ["--dataset-name", "timed_trace", "--dataset-path", write(tmp_path / "t.jsonl", usual)]
    words += ["--timed-trace-chunk-hash-size", "4", "--timed-trace-sec-multiplier", "0.001"]
    first, second, third = drawn(*words)
    assert [sample.arrival for sample in (first, second, third)] == pytest.approx([0.0, 0.5, 0.6])
    assert [sample.prompt_len for sample in (first, second, third)] == [6, 9, 7]
    assert [sample.output_len for sample in (first, second, third)] == [2, 3, 3]
    assert list(second.token_ids[:6]) == list(first.token_ids)
    assert list(third.token_ids[:4]) != list(first.token_ids[:4])
    assert len(drawn(*words, "--num-prompts", "2")) == 2
    named = write(
        tmp_path / "n.jsonl", [{"at": 3, "in": 5, "out": 4, "ids": [7]}, {"at": 4, "in": 4, "out": 4, "ids": [7]}]
    )
    labels = ["--timed-trace-label-timestamp", "at", "--timed-trace-label-input-length", "in"]
    labels += ["--timed-trace-label-output-length", "out", "--timed-trace-label-hash-ids", "ids"]
    one, two = drawn("--dataset-name", "timed_trace", "--dataset-path", named, *labels)
    assert (one.prompt_len, one.output_len, two.arrival) == (5, 4, 1.0)
    assert list(one.token_ids[:4]) == list(two.token_ids)


# --- refusals ---


@pytest.mark.parametrize(
    ("words", "flag"),
    [
        (["--num-prompts", "0"], "--num-prompts"),
        (["--random-prefix-len", "-1"], "--random-prefix-len"),
        (["--random-range-ratio", "1"], "--random-range-ratio"),
        (["--random-range-ratio", "x"], "--random-range-ratio"),
        (["--random-range-ratio", '{"in": 1}'], "--random-range-ratio"),
        (["--dataset-name", "random-mm"], "--dataset-name"),
        (["--dataset-name", "custom_image"], "--dataset-name"),
        (["--dataset-name", "hf"], "--dataset-name"),
        (["--dataset-name", "sharegpt"], "--dataset-path"),
        (["--dataset-path", "x"], "--dataset-path"),
        (["--dataset-name", "sonnet", "--random-input-len", "9"], "--random-input-len"),
        (["--dataset-name", "multi_turn", "--no-oversample"], "--no-oversample"),
        (["--sonnet-input-len", "9"], "--sonnet-input-len"),
        (["--disable-shuffle"], "--disable-shuffle"),
        (["--chat-template-kwargs.a", "1"], "--chat-template-kwargs"),
        (["--dataset-name", "sonnet", "--sonnet-prefix-len", "999"], "--sonnet-prefix-len"),
        (["--dataset-name", "prefix_repetition", "--num-prompts", "9"], "--num-prompts"),
        (["--dataset-name", "custom", "--dataset-path", "x", "--custom-output-len", "0"], "--custom-output-len"),
        (["--dataset-name", "timed_trace", "--dataset-path", "x", "--timed-trace-sec-multiplier", "0"],
         "--timed-trace-sec-multiplier"),
    ],
)  # fmt: skip
def test_settings_are_refused(words: list[str], flag: str) -> None:
    with pytest.raises(ConfigError) as error:
        config(*words)
    assert error.value.setting == flag


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("custom", "{", "data:1: invalid JSON"),
        ("custom", "[]", "data:1: is not a JSON object"),
        ("custom", '{"text": 1}', "data:1: has no prompt"),
        ("custom", "", "has no usable prompts"),
        ("sharegpt", "[{}]", "has no conversations"),
        ("sharegpt", "{", "invalid JSON"),
        ("spec_bench", '{"turns": []}', "data:1: has no turns"),
        ("burstgpt", "a,b\n1,2", "has no column 'Model'"),
        ("timed_trace", '{"timestamp": 1}', "data:1: has no number 'input_length'"),
        ("timed_trace", "", "has no requests"),
    ],
)
def test_unusable_files(name: str, text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "data"
    file.write_text(text)
    with pytest.raises(ConfigError) as error:
        drawn("--dataset-name", name, "--dataset-path", str(file))
    assert message in str(error.value)
    assert error.value.setting == "--dataset-path"
    with pytest.raises(ConfigError, match="No such file"):
        drawn("--dataset-name", name, "--dataset-path", str(tmp_path / "none"))
