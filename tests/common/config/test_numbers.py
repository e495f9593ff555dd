import pytest
from support.suite.rows import each_row

from pagoda.common.config.fields import human_readable_int, human_readable_int_or_auto, json_object, json_or_text


@each_row(
    ("text", "value"),
    [
        ("7", 7),
        (" 7 ", 7),
        ("-3", -3),
        ("+3", 3),
        ("1k", 1000),
        ("1K", 1024),
        ("25.6k", 25_600),
        ("1.0009k", 1000),
        ("2m", 2_000_000),
        ("2M", 2 * 2**20),
        ("1.5g", 1_500_000_000),
        ("1G", 2**30),
        ("3t", 3 * 10**12),
        ("3T", 3 * 2**40),
        (f"{10**400}k", 10**403),
    ],
)
def test_numbers_with_suffixes(text: str, value: int) -> None:
    assert human_readable_int(text) == value


@pytest.mark.parametrize(("text", "better"), [("1.5K", "1.5k"), ("0.5G", "0.5g"), ("2.0M", "2.0m")])
def test_a_fraction_of_a_power_of_two_is_refused(text: str, better: str) -> None:
    with pytest.raises(ValueError, match=f"did you mean {better}\\?"):
        human_readable_int(text)


@each_row("text", ["", "k", "1KiB", "1kb", "-1k", "1 k", "1e3", "1.5", "auto", "٣k"])
def test_invalid_numbers(text: str) -> None:
    with pytest.raises(ValueError, match="4K"):
        human_readable_int(text)


@pytest.mark.parametrize("text", ["auto", "AUTO", " -1 "])
def test_auto_and_minus_one_parse_to_none(text: str) -> None:
    assert human_readable_int_or_auto(text) is None
    assert human_readable_int_or_auto("2k") == 2000


@each_row("text", ["", "{", "[1]", "3", '"x"', '{"x": NaN}', '{"x": Infinity}', "{'x': 1}"])
def test_invalid_json_objects(text: str) -> None:
    with pytest.raises(ValueError, match="JSON"):
        json_object(text)


def test_json_or_text() -> None:
    texts = ("1", "1.5", "true", "null", '["a"]', '{"a": 1}', "auto", "NaN", "01", "True")
    values = [1, 1.5, True, None, ["a"], {"a": 1}, "auto", "NaN", "01", "True"]
    assert [json_or_text(each) for each in texts] == values
