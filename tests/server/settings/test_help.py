"""`--help` and `--help=WHAT`, on every command that starts an engine or reaches one."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from pagoda.common.config.commands import COMMAND_SETTINGS
from pagoda.common.config.settings import ENGINE_SETTINGS, SERVER_SETTINGS
from pagoda.server.cli import main
from pagoda.server.parsers.registry import REASONING_FORMATS, TOOL_FORMATS
from pagoda.server.settings.flags import FlagParser

ENGINE_COMMANDS = ("serve", "run-batch", "bench latency", "bench throughput")
COMMANDS = (*ENGINE_COMMANDS, "bench startup", "bench serve", "chat", "complete", "collect-env")


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")


def shown(command: str, capsys: pytest.CaptureFixture[str], what: str = "") -> str:
    with pytest.raises(SystemExit) as end:
        main.main([*command.split(), f"--help={what}" if what else "--help"])
    assert end.value.code == 0
    said = capsys.readouterr()
    assert said.err == ""
    assert all(len(line) <= 100 or " " not in line.strip() for line in said.out.splitlines())
    return said.out


def flags_in(text: str) -> list[str]:
    """Return the flags of a listing, in its order."""
    flags = []
    for line in text.splitlines():
        word = line.strip().split(" ")[0].rstrip(",")
        if line.startswith("  -") and not line.startswith("   "):
            flags.append(word.replace("[no-]", ""))
    return flags


@pytest.mark.setting("--help")
@pytest.mark.parametrize("command", COMMANDS)
def test_plain_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(command, capsys)
    assert text.startswith(f"usage: pagoda {command} ")
    assert "-h, --help" in text


def test_plain_help_lists_groups_and_further_help(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown("serve", capsys)
    assert "[MODEL]" in text.splitlines()[0]
    assert "  SchedulerConfig  " in text
    assert "pagoda serve --help=SchedulerConfig" in text
    assert "--max-num-seqs" not in text
    assert "--enable-chunked-prefill" not in text
    assert len(text.splitlines()) < 50


def test_plain_help_lists_the_commands_own_flags(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown("bench latency", capsys)
    assert "--num-iters-warmup" in text
    assert "--max-num-seqs" not in text


def test_a_single_flag_of_another_group_is_not_listed_as_the_groups(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown("chat", capsys)
    assert "HTTP server" not in text
    assert text.index("Other flags:") < text.index("--[no-]log-error-stack")


def test_numbers_and_files_have_placeholders_that_say_so(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown("simulate", capsys)
    assert "--num-prompts N " in text
    assert "--output-json FILE " in text


def test_short_help(capsys: pytest.CaptureFixture[str]) -> None:
    whole = shown("serve", capsys)
    with pytest.raises(SystemExit):
        main.main(["serve", "-h"])
    assert capsys.readouterr().out == whole


@pytest.mark.setting("--help")
@pytest.mark.parametrize("command", ENGINE_COMMANDS)
def test_help_listgroup(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    names = [line.split()[0] for line in shown(command, capsys, "listgroup").splitlines() if line[2] != " "]
    assert len(names) == len(set(names))
    assert set(names) >= {setting.group for setting in ENGINE_SETTINGS.values()}


@pytest.mark.setting("--help")
@pytest.mark.parametrize("command", ENGINE_COMMANDS)
@pytest.mark.parametrize("what", ["SchedulerConfig", "schedulerconfig"])
def test_help_of_a_group(command: str, what: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(command, capsys, what)
    expected = {each.flag for each in ENGINE_SETTINGS.values() if each.group == "SchedulerConfig"}
    assert text.startswith("SchedulerConfig: ")
    assert set(flags_in(text)) == expected
    order = [ENGINE_SETTINGS[flag[2:].replace("-", "_")].option.status for flag in flags_in(text)]
    assert order == sorted(order, key=["implemented", "no effect", "refused"].index)


@pytest.mark.parametrize(("what", "group"), [("VllmConfig", "ExtensionConfig"), ("Frontend", "ServerConfig")])
def test_help_of_a_group_by_an_alias(what: str, group: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert shown("serve", capsys, what) == shown("serve", capsys, group)


@pytest.mark.setting("--help")
@pytest.mark.parametrize("command", ENGINE_COMMANDS)
@pytest.mark.parametrize("what", ["max-num-seqs", "--max-num-seqs", "max_num_seqs", "MAX-NUM-SEQS"])
def test_help_of_a_flag(command: str, what: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(command, capsys, what)
    assert text.startswith("--max-num-seqs N\n")
    for part in ("Maximum number of sequences per step", "SchedulerConfig", "an integer", "implemented"):
        assert part in text
    for part in ("max-num-seqs:", "PAGODA_MAX_NUM_SEQS", "LLM(max_num_seqs=...)"):
        assert part in text


@pytest.mark.parametrize(
    ("what", "parts"),
    [
        ("tp", ["-tp, --tensor-parallel-size", "implemented"]),
        ("pp", ["-pp, --pipeline-parallel-size", "only 1: "]),
        ("swap-space", ["4.0", "no effect: preempted requests are recomputed"]),
        ("dtype", ["one of auto, float32, ", "auto"]),
        ("no-async-scheduling", ["--[no-]async-scheduling", "or --no-async-scheduling"]),
        ("max-model-len", ["4k is 4000, 4K is 4096"]),
        ("hf-overrides", ["--hf-overrides.key VALUE"]),
        ("served-model-name", ["--served-model-name A B"]),
        ("rope-theta", ["deprecated: use --hf-overrides.rope_theta"]),
        ("config", ["--config FILE", "YAML"]),
        ("port", ["8000", "PAGODA_PORT"]),
        ("hf-token", ["--hf-token [TOKEN]"]),
    ],
)
def test_details_of_a_flag(what: str, parts: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    text = " ".join(shown("serve", capsys, what).split())
    for part in parts:
        assert part in text
    assert ("LLM(" in text) == (what not in ("config", "port"))


def test_help_of_a_client_flag_names_no_file_or_variable(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown("chat", capsys, "url")
    assert "http://localhost:8000/v1" in text
    assert "PAGODA_" not in text


@pytest.mark.setting("--help")
@pytest.mark.parametrize("command", ENGINE_COMMANDS)
def test_help_of_a_word_in_a_flag(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = flags_in(shown(command, capsys, "max"))
    named = {each.flag for each in COMMAND_SETTINGS[command].values() if "max" in each.name}
    assert named <= set(flags)
    assert all("max" in flag for flag in flags[: len(named)])


def test_help_of_a_word_in_a_description(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown("serve", capsys, "TLS")
    assert {"--ssl-keyfile"} <= set(flags_in(text))
    assert "Flags that mention tls:" in text


def test_help_all(capsys: pytest.CaptureFixture[str]) -> None:
    flags = flags_in(shown("serve", capsys, "all"))
    settings = ENGINE_SETTINGS | SERVER_SETTINGS
    assert len(flags) == len(set(flags))
    shortest = {min(each.flags, key=len) for each in settings.values()}
    assert shortest <= set(flags)


@pytest.mark.parametrize(
    ("what", "hint"),
    [
        ("maxnumsek", "did you mean max-num-seqs?"),
        ("SchedulrConfig", "did you mean SchedulerConfig?"),
        ("qqqq", "try --help=listgroup"),
    ],
)
def test_help_of_an_unknown_word(what: str, hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["serve", f"--help={what}"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("pagoda: error: --help: ")
    assert hint in said.err
    assert said.err.count("\n") == 1


def test_a_parser_prints_the_same_page() -> None:
    parser = FlagParser(prog="x", description="Does it.")
    parser.add_argument("--mine", help="A flag that is %s.")
    assert parser.format_help().startswith("usage: x [--flag VALUE ...]\n\nDoes it.\n")
    assert "A flag that is %s." in parser.format_help()


def test_help_of_a_server_imports_nothing_heavy(tmp_path: Path) -> None:
    check = (
        "import sys; from pagoda.server.cli.main import main\n"
        "try: main(['serve', '--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'jax', 'transformers', 'fastapi', 'pydantic', 'uvicorn', 'tokenizers'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    paths = [path for path in sys.path if path]
    done = subprocess.run(
        [sys.executable, "-c", check],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": ":".join(paths), "COLUMNS": "100"},
        cwd=tmp_path,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr


def test_help_lists_only_choices_that_are_accepted() -> None:
    for setting in ENGINE_SETTINGS.values():
        for choice in setting.choices or ():
            note = setting.note(setting.convert_text(choice))
            assert note is None or setting.option.status == "no effect" or setting.option.deprecated, setting.flag
        for refused in setting.option.refused_values:
            assert refused not in (setting.choices or ())
            assert not re.search(rf"(?<![\w-]){refused}(?![\w-])", setting.option.help), (setting.flag, refused)


def test_help_lists_the_registered_formats(capsys: pytest.CaptureFixture[str]) -> None:
    for flag, formats in (("tool-call-parser", TOOL_FORMATS), ("reasoning-parser", REASONING_FORMATS)):
        with pytest.raises(SystemExit):
            main.main(["serve", f"--help={flag}"])
        words = re.split(r"[\s,]+", capsys.readouterr().out)
        assert set(formats) <= set(words)
