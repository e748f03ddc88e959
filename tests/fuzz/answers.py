"""Run an input in this process, and judge the answer: its exit code, its words, its files and its numbers."""

import contextlib
import io
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import traceback
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import pytest
from starlette.testclient import TestClient

from fuzz.inputs import Tree, write_files
from fuzz.nonsense import nonsense, read
from windtunnel import cli, limits
from windtunnel.dashboard.server import dashboard_app
from windtunnel.dashboard.view import dashboard_of

MOST_COMPILED_S = 120.0
"""The same in a process of its own, which may have to compile first."""
MOST_S = 20.0
"""An answer that computes for longer hangs, and one that takes six times as long: a busy machine is no hang."""
MOST_ADDRESS = 30_000
"""Characters of a path, and of a query, that the client sends: httpx refuses addresses above 65,536."""
MAY_FAIL = re.compile(
    r"is above|does not hold|failed|no answer|cannot be reached|Connection refused|holds no|none of|is gone|memory"
)
"""Words of failures that are no wrong input, for which a command exits with 1."""
_NO_BYTE = re.compile("[\0\ud800-\udc7f\udd00-\udfff]")
"""Characters that no word of a command line has: bytes that are not UTF-8 become others."""
limits.COSTS["measured runs"] = (20_000, 1e-4)
"""The fuzzer's limit of time stands for the loops alone, which are interpreted."""
INJECTED = ("<script>alert(1)", "'\"><b>x")


class HangError(BaseException):
    """An answer did not come in time; nothing that catches errors catches this."""


class ProblemError(AssertionError):
    """An answer that may not be."""


@dataclass
class Answer:
    """What an input got."""

    code: int
    stdout: str
    stderr: str
    files: dict[str, bytes] = field(default_factory=dict)
    """New and changed files."""


@contextlib.contextmanager
def in_time(limit_s: float = MOST_S) -> Iterator[None]:
    """Raise HangError in the main thread after a time."""

    def ring(*_: Any) -> None:
        raise HangError(f"no answer within {limit_s:g} s")

    clocks = {signal.SIGPROF: (signal.ITIMER_PROF, limit_s), signal.SIGALRM: (signal.ITIMER_REAL, 6 * limit_s)}
    before = {number: signal.signal(number, ring) for number in clocks}
    for timer, after_s in clocks.values():
        signal.setitimer(timer, after_s)
    try:
        yield
    finally:
        for number, (timer, _) in clocks.items():
            signal.setitimer(timer, 0)
            signal.signal(number, before[number])


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def run_command(tree: Tree, folder: Path) -> Answer:
    """Run a command in an empty folder that holds its files.

    Raises:
        Exception: what the command did not turn into a sentence.
    """
    answer = _run(tree, folder)
    if "bug in windtunnel" in answer.stderr:
        # Once more, to see where.
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(cli.DEBUG_VARIABLE, "1")
            _run(tree, folder)
    return answer


def _run(tree: Tree, folder: Path) -> Answer:
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    write_files(tree, folder)
    before, out, err = snapshot(folder), io.StringIO(), io.StringIO()
    words = [_NO_BYTE.sub("\udcff", str(word)) for word in tree["command"]]
    with contextlib.chdir(folder), in_time(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.run(words)
    files = {name: content for name, content in snapshot(folder).items() if before.get(name) != content}
    return Answer(code, out.getvalue(), err.getvalue(), files)


ASK = "import pickle, sys; from fuzz import answers, night; folder, tree = pickle.load(sys.stdin.buffer); "
ASK += "answers.in_time.__wrapped__.__defaults__ = (answers.MOST_COMPILED_S,); answers.ask(night.served(folder), tree)"
"""Program that sends a request to a dashboard in a folder."""


def ends_compiled(tree: Tree, folder: Path) -> bool:
    """Whether an input is answered within a minute or two in a process of its own, where kernels are compiled."""
    surroundings = {name: value for name, value in os.environ.items() if name != "NUMBA_DISABLE_JIT"}
    surroundings["PYTHONPATH"] = os.pathsep.join(sys.path)
    command, known = [sys.executable, "-c", ASK], pickle.dumps((folder, tree))
    if "http" not in tree:
        write_files(tree, folder)
        command = [sys.executable, "-m", "windtunnel", *(_NO_BYTE.sub("\udcff", str(word)) for word in tree["command"])]
    call = partial(subprocess.run, command, cwd=folder, env=surroundings, capture_output=True, timeout=MOST_COMPILED_S)
    try:
        done = call(check=False, input=known)
    except subprocess.TimeoutExpired:
        return False
    return "http" not in tree or done.returncode == 0


def judge(tree: Tree, answer: Answer) -> None:
    """Raise ProblemError for an answer that may not be."""
    words = [str(word) for word in tree["command"]]
    if "bug in windtunnel" in answer.stderr or "Traceback" in answer.stderr:
        raise ProblemError(answer.stderr)
    if answer.code not in (0, 2) and not (answer.code == 1 and MAY_FAIL.search(answer.stderr)):
        raise ProblemError(f"exit code {answer.code}: {answer.stderr[-300:]}")
    if answer.code == 2:
        lines = [line for line in answer.stderr.splitlines() if line.startswith(("error: ", "hint: "))]
        if not lines or not lines[0].startswith("error: ") or sum(line.startswith("error: ") for line in lines) != 1:
            raise ProblemError(f"not one sentence: {answer.stderr[-300:]!r}")
        if answer.stdout:
            raise ProblemError(f"wrong input, and an answer: {answer.stdout[:200]!r}")
        if answer.files:
            raise ProblemError(f"wrong input, and files: {sorted(answer.files)}")
    if answer.code == 0 and "--json" in words and "--help" not in words and answer.stdout.startswith("{"):
        check_document(answer.stdout)
    for name, content in answer.files.items():
        if name.endswith((".html", ".svg")):
            check_page(content.decode(), names_in(tree))
        if name.endswith(".tmp") or Path(name).name.startswith(".tmp"):
            raise ProblemError(f"{name} was left behind")


def check_document(text: str) -> None:
    """Raise ProblemError for a document that is no JSON, or says what cannot be."""
    try:
        document = read(text)
    except ValueError as error:
        raise ProblemError(f"no JSON: {error}") from None
    if wrong := list(nonsense(document)):
        raise ProblemError(f"nonsense: {'; '.join(wrong[:3])}")


def names_in(tree: Any) -> set[str]:
    """The words `nan` and `inf` that were put in as names, which a page may show."""
    texts = [tree] if isinstance(tree, str) else []
    branches = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ()
    return {text for text in texts if text in ("nan", "inf")}.union(*map(names_in, branches))


def check_page(text: str, names: Collection[str] = ()) -> None:
    """Raise ProblemError for a page that holds a name as it was typed, or shows no number but where it is a name."""
    for words in INJECTED:
        if words in text:
            raise ProblemError(f"the page holds {words!r} as it was typed")
    if any(shown not in names for shown in re.findall(r">\s*(-?(?:nan|inf))\b(?! )", text)):
        raise ProblemError("the page shows nan or inf")


# ------------------------------------------------------------------------------------------------------- the dashboard


def client_of(folder: Path) -> TestClient:
    """A client of a dashboard of a folder, in this process."""
    app = dashboard_app(dashboard_of(folder), "127.0.0.1")
    return TestClient(app, base_url="http://127.0.0.1:8000", raise_server_exceptions=False, follow_redirects=False)


def ask(client: TestClient, tree: Tree, is_ours: bool = True, names: Collection[str] = ()) -> tuple[int, str]:
    """Send the request of a tree.

    Args:
        is_ours: the numbers of the answer are predictions; else they repeat a file.
        names: `names_in` what the server shows beside the request.

    Raises:
        ProblemError: an answer that may not be.
    """
    http = tree["http"]
    query = urlencode([(str(name), str(value)) for name, value in _pairs(http.get("query"))], errors="replace")
    query = query[:MOST_ADDRESS]
    headers = {_latin(name): _latin(value) for name, value in _pairs(http.get("headers"))}
    form = [(str(name), str(value)) for name, value in _pairs(http.get("form"))]
    path = quote(str(http.get("path", "/")).encode("utf-8", "replace"), safe="/%.~<>")[:MOST_ADDRESS]
    body = urlencode(form, errors="replace").encode() if "form" in http else None
    said = io.StringIO()
    with in_time(), contextlib.redirect_stderr(said):
        response = client.request(
            _latin(http.get("method", "GET")) or "GET",
            f"http://127.0.0.1:8000/{path.lstrip('/')}{'?' if query else ''}{query}",
            headers=headers,
            content=body,
        )
    text = response.text
    if said.getvalue() or response.status_code == 500 or "bug in windtunnel" in text:
        raise ProblemError(f"{response.status_code} {said.getvalue()[-2000:]} {text[:300]}")
    if response.status_code not in (200, 304, 307, 400, 403, 404, 405):
        raise ProblemError(f"status {response.status_code}: {text[:300]}")
    if "Content-Security-Policy" not in response.headers:
        raise ProblemError("an answer without a content security policy")
    kind = response.headers.get("content-type", "")
    if kind.startswith("application/json") and response.status_code == 200 and text and is_ours:
        check_document(text)
    if kind.startswith("text/html"):
        check_page(text, {*names, *names_in(tree)})
    return response.status_code, text


def _pairs(table: Any) -> list[tuple[Any, Any]]:
    if not isinstance(table, dict):
        return []
    return [(name, part) for name, value in table.items() for part in (value if isinstance(value, list) else [value])]


def _latin(value: Any) -> str:
    """A text that a header can carry."""
    return "".join(letter for letter in str(value) if " " <= letter <= "~")[:2000].strip()


def ask_results(tree: Tree, folder: Path) -> None:
    """Put a result's files in a folder, and ask a dashboard for it in every way."""
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    write_files(tree, folder)
    client = client_of(folder)
    paths = [f"/{page}/" for page in ("run", "requests", "scenario", "timeline", "step", "api/run", "api/step")]
    paths += ["/", "/api/runs", "/run/found.json", "/compare?run=found.json&run=summary.json"]
    for path in paths:
        address, _, query = path.partition("?")
        http = {"path": address, "headers": {"Host": "127.0.0.1:8000"}}
        http["query"] = {"run": [part.partition("=")[2] for part in query.split("&")]} if query else {}
        ask(client, {"http": http}, is_ours=False, names=names_in(tree))


# -------------------------------------------------------------------------------------------------------- signatures


def signature(error: BaseException) -> str:
    """Where an error comes from: its type, and the last place of it in windtunnel."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "/windtunnel/" in frame.filename and "/cli/__init__" not in frame.filename]
    where = f"{Path(ours[-1].filename).name}:{ours[-1].name}" if ours else ""
    if isinstance(error, ProblemError):
        return re.sub(r"\d[\d.e+-]*", "0", str(error))[:90]
    return f"{type(error).__name__} in {where}"
