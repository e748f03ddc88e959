"""The program around the verbs: help, version, the voice of its errors, and how it ends."""

from __future__ import annotations

import ast
import io
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from windtunnel import cli
from windtunnel.cli import verbs
from windtunnel.errors import WindtunnelError

if TYPE_CHECKING:
    from cli.conftest import Command


FOLDER = Path(cli.__file__).parent


def test_without_arguments_it_helps(windtunnel: Command) -> None:
    done = windtunnel()
    assert done.code == 0
    assert all(verb in done.stdout for verb in verbs.declared("verbs"))


@pytest.mark.parametrize("verb", verbs.declared("verbs"))
def test_every_verb_has_help(windtunnel: Command, verb: str) -> None:
    done = windtunnel(verb, "--help")
    assert done.code == 0
    assert done.stdout.startswith(f"Usage: windtunnel {verb}")
    assert max(map(len, done.stdout.splitlines())) <= 100


def commands(declared: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The commands that `verbs.yaml` declares, those of groups too."""
    for verb in declared.values():
        yield from commands(verb["commands"]) if "commands" in verb else (verb,)


def test_options_stand_under_their_headings(windtunnel: Command) -> None:
    done = windtunnel("simulate", "--help")
    headings = [line for line in done.stdout.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert headings == ["What is served, on what:", "Engine:", "Load:", "Sampling:", "Result:", "General:"]


def test_every_verb_has_a_line_in_the_list() -> None:
    assert all(verb["line"].endswith(".") for verb in verbs.declared("verbs").values())


def test_every_command_with_an_answer_writes_it_as_a_page() -> None:
    """The others only write files or serve; a lab run's pages lie beside its results."""
    without = {verb["in"] for verb in commands(verbs.declared("verbs")) if "page" not in verb["options"]}
    assert without == {
        "init", "mcp", "dashboard", "serving.serve", "warm", "tables:fetch", "network:generate", "network:check",
        "lab.capture:to_table", "lab.capture:scrub", "lab.run:run", "lab.run:sweep",
    }  # fmt: skip


def test_every_group_of_options_has_a_verb() -> None:
    named = {group for verb in commands(verbs.declared("verbs")) for group in verb["options"]}
    assert named | {"limits"} == set(verbs.declared("options"))  # every verb has limits of memory and time


@pytest.mark.parametrize("verb", list(commands(verbs.declared("verbs"))), ids=lambda verb: verb["in"])
def test_a_verb_reads_only_options_that_it_has(verb: Mapping[str, Any]) -> None:
    module, _, function = verb["in"].partition(":")
    declared = {option.name for group in verb["options"] for option in verbs.options_in(group)}
    tree = ast.parse((FOLDER / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8"))
    bodies = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    read = names_read(bodies[function or "command"], bodies)
    assert read <= declared | set(verb.get("arguments", ())) | {"of", "given"}


def names_read(function: ast.FunctionDef, bodies: Mapping[str, ast.FunctionDef]) -> set[str]:
    """The fields of `options` that a function reads, or one that it names reads."""
    below = {node.id for node in ast.walk(function) if isinstance(node, ast.Name)} & bodies.keys() - {function.name}
    found = set[str]().union(*(names_read(bodies[name], bodies) for name in below))
    for node in ast.walk(function):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "options":
            is_set = isinstance(node.ctx, ast.Store)
            found |= set() if is_set else {node.attr}
    return found


def test_it_has_a_version(windtunnel: Command) -> None:
    assert windtunnel("--version").stdout.startswith("windtunnel ")


@pytest.mark.parametrize(
    ("arguments", "message", "hint"),
    [
        (["simulat"], "windtunnel has no command 'simulat'", "did you mean simulate?"),
        (["simulate", "--concurency", "4"], "there is no option --concurency", "did you mean --concurrency?"),
        (["simulate", "--rate", "0,5"], "--rate: '0,5' is not a valid float", "without a comma: 0.5"),
        (["simulate", "--tp", "four"], "--tp: 'four' is not a valid integer", "see `windtunnel simulate --help`"),
        (["simulate", "--tp"], "--tp is given without its N", "--tp N: Tensor parallelism.  [1]"),
        (
            ["train", "--lora", "--model", "llama-3.1-8b"],
            "--lora is given without its RANK",
            "--lora RANK: Train adapters of this rank alone, as 16",
        ),
        (
            ["simulate", "a.yaml", "b.yaml"],
            "got unexpected extra argument (b.yaml)",
            "see `windtunnel simulate --help`",
        ),
        (["bench", "http://a/v1"], "got unexpected extra argument (http://a/v1)", "did you mean --endpoint URL?"),
        (["bench", "a.yaml"], "got unexpected extra argument (a.yaml)", "did you mean --workload FILE?"),
        (["vidur", "config.json"], "--tables is missing", "see `windtunnel vidur --help`"),
        (
            ["train", "--model", "llama-3.1-8b", "--device", "l4"],
            "--sequence-tokens is missing: tokens of one sequence, as 4096",
            "give --sequence-tokens, or sequence_tokens in a file or in Python",
        ),
        (["profile", "check"], "FOLDER is missing", "see `windtunnel profile check --help`"),
        (["catalog", "device"], "the catalog has no 'device'", "did you mean devices?"),
        (["--verbose"], "there is no option --verbose", "did you mean --version?"),
    ],
)
def test_usage_errors_speak_like_all_others(windtunnel: Command, arguments: list[str], message: str, hint: str) -> None:
    done = windtunnel(*arguments)
    assert (done.code, done.stdout) == (2, "")
    assert done.stderr == f"error: {message}\nhint: {hint}\n"


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["simulate", "--num-gpus", "4"], "the degrees of a server give its devices, as --tp 4 does"),
        (["capacity", "--num-devices", "4"], "the degrees of a server give its devices, as --tp 4 does"),
        (["train", "--nnodes", "2"], "count devices, not servers: --num-devices 16"),
        (["recommend", "--gpus", "8"], "--devices h100_sxm,l40s are the kinds of devices"),
        (["simulate", "--speculative-config", "{}"], "a server's option (vllm): --from-command takes"),
        (["recommend", "--tp", "8"], "layouts are tried, all that a node holds"),
    ],
)
def test_an_option_of_other_commands_is_explained(windtunnel: Command, arguments: list[str], hint: str) -> None:
    done = windtunnel(*arguments)
    assert done.code == 2
    assert done.stderr.startswith(f"error: there is no option {arguments[1]}\nhint: {hint}")


def ends_with(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def broken(*_arguments: object, **_settings: object) -> None:
        raise error

    monkeypatch.setattr(verbs.windtunnel, "main", broken)


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (WindtunnelError("the engine died", "start it again"), 1, "error: the engine died\nhint: start it again\n"),
        (KeyboardInterrupt(), 130, "error: interrupted"),
        (MemoryError(), 1, "error: this machine's memory does not hold that\n"),
        (RecursionError(), 2, "error: something in the input is nested too deeply\n"),
        (ZeroDivisionError("division by zero"), 1, "error: sorry, this is a bug in windtunnel (ZeroDivisionError: "),
    ],
)
def test_failures_end_in_one_sentence(
    windtunnel: Command, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, message: str
) -> None:
    monkeypatch.delenv(cli.DEBUG_VARIABLE, raising=False)
    ends_with(monkeypatch, error)
    done = windtunnel("simulate")
    assert (done.code, done.stdout) == (code, "")
    assert done.stderr.startswith(message)
    assert "Traceback" not in done.stderr


def test_a_file_cut_short_is_no_ctrl_c(windtunnel: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(_file: str) -> None:
        raise EOFError("marshal data too short")

    monkeypatch.setattr("windtunnel.cli.verbs.windtunnel.invoke", read)
    done = windtunnel("simulate")
    assert (done.code, done.stderr.strip().splitlines()[0]) == (1, "error: input ended early (marshal data too short)")


def test_a_bug_shows_its_traceback_to_who_asks(windtunnel: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cli.DEBUG_VARIABLE, "1")
    ends_with(monkeypatch, ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        windtunnel("simulate")


@pytest.mark.full
def test_a_reader_who_leaves_early_is_no_error() -> None:
    command = [sys.executable, "-m", "windtunnel", "catalog", "models", "--json"]
    environment = os.environ | {"PYTHONPATH": str(Path(cli.__file__).parents[2])}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""


def test_a_stream_without_a_character_gets_ascii(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii", newline=""))
    monkeypatch.setattr(sys, "stderr", None)
    cli._mend_streams()
    sys.stdout.write("\u2501 80% \u00b1 5\u2026 \u96ea")
    sys.stdout.flush()
    assert written.getvalue() == b"- 80% +- 5... ?"
    with sys.stderr:
        assert sys.stderr.write("lost") == 4


def test_a_closed_stdout_is_said_before_any_work(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ends_with(monkeypatch, AssertionError("it worked"))
    monkeypatch.setattr(sys, "stdout", None)
    assert cli.run(["simulate"]) == 1
    assert capsys.readouterr().err.startswith("error: stdout is closed, and results go there\nhint: ")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, 130)])
def test_a_signal_ends_a_command_in_order(monkeypatch: pytest.MonkeyPatch, number: int, code: int) -> None:
    former = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGHUP)}
    cleaned = []

    def work(*_arguments: object, **_settings: object) -> None:
        try:
            signal.raise_signal(number)
        finally:
            cleaned.append(number)

    monkeypatch.setattr(verbs.windtunnel, "main", work)
    monkeypatch.setattr(sys, "argv", ["windtunnel"])
    try:
        for each in former:
            signal.signal(each, signal.SIG_DFL)
        with pytest.raises(SystemExit) as ended:
            cli.main()
    finally:
        for each, handler in former.items():
            signal.signal(each, handler)
    assert (ended.value.code, cleaned) == (code, [number])


def test_nohup_still_ignores_a_hangup(monkeypatch: pytest.MonkeyPatch) -> None:
    former = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGHUP)}
    monkeypatch.setattr(verbs.windtunnel, "main", lambda *_arguments, **_settings: signal.raise_signal(signal.SIGHUP))
    monkeypatch.setattr(sys, "argv", ["windtunnel"])
    try:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        with pytest.raises(SystemExit) as ended:
            cli.main()
    finally:
        for each, handler in former.items():
            signal.signal(each, handler)
    assert ended.value.code == 0
