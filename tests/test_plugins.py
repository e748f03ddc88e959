import re
from contextlib import ExitStack
from pathlib import Path

import pytest

from plugin_package import installed_plugin
from windtunnel.cli import run
from windtunnel.errors import InputError
from windtunnel.plugins import Registry

ROUTERS = Registry("windtunnel.test_kind", "windtunnel.compiled", "test kind")


def test_shipped_alternatives_are_the_modules_of_their_folder() -> None:
    assert {"heap", "jit", "records"} <= set(ROUTERS.names())
    assert ROUTERS.get("heap").__name__ == "windtunnel.compiled.heap"


def test_an_installed_package_adds_an_alternative(tmp_path: Path) -> None:
    with installed_plugin(tmp_path, "windtunnel.test_kind", "sticky", "ANSWER = 42\n") as files:
        assert ROUTERS.names()[-1] == "sticky"
        assert "sticky" in ROUTERS
        assert ROUTERS.get("sticky").ANSWER == 42
        assert len(files) == 1
    assert "sticky" not in ROUTERS.names()
    assert "sticky" not in ROUTERS
    assert "heap" in ROUTERS


def test_an_entry_point_may_name_an_object(tmp_path: Path) -> None:
    with installed_plugin(tmp_path, "windtunnel.test_kind", "sticky", "ANSWER = 42\n", "ANSWER"):
        assert ROUTERS.get("sticky") == 42


def test_an_unknown_name_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(InputError, match=r"(?m)^unknown test kind 'heep'$") as error:
        ROUTERS.get("heep")
    assert "heap" in (error.value.hint or "")


def test_a_shipped_name_cannot_be_taken(tmp_path: Path) -> None:
    with (
        installed_plugin(tmp_path, "windtunnel.test_kind", "heap", ""),
        pytest.raises(InputError, match="has the name of a shipped one"),
    ):
        ROUTERS.get("heap")


def test_a_name_that_is_taken_without_a_module_is_refused(tmp_path: Path) -> None:
    taken = Registry("windtunnel.test_kind", None, "test kind", taken=("auto",))
    assert "auto" not in taken
    with (
        installed_plugin(tmp_path, "windtunnel.test_kind", "auto", ""),
        pytest.raises(InputError, match="the test kind 'auto' of 'plugin_auto' has the name of a shipped one"),
    ):
        taken.get("auto")


def test_a_name_of_two_packages_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = [tmp_path / "one", tmp_path / "two"]
    for number, folder in enumerate(folders):
        folder.mkdir()
        info = folder / f"package_{number}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: package_{number}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[windtunnel.test_kind]\nsticky = module_{number}\n")
    monkeypatch.syspath_prepend(folders[1])
    with installed_plugin(folders[0], "windtunnel.test_kind", "other", "ANSWER = 1\n"):
        assert ROUTERS.get("other").ANSWER == 1
        with pytest.raises(InputError, match=r"'sticky' is of several installed packages: module_. and module_."):
            ROUTERS.get("sticky")


def test_a_failure_of_ours_names_the_packages_that_took_part(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise TypeError("no number")

    monkeypatch.setattr("windtunnel.network.collectives.run._algorithm", fail)
    with installed_plugin(tmp_path, "windtunnel.collectives", "odd", "OPERATIONS = ('all_reduce',)\n"):
        assert run([*COLLECTIVE, "--backend", "flow", "--algorithm", "odd"]) == 1
    assert "or an installed package gave a wrong value: plugin_odd" in capsys.readouterr().err


def test_a_broken_package_is_named(tmp_path: Path) -> None:
    with (
        installed_plugin(tmp_path, "windtunnel.test_kind", "broken", "import no_such_module\n"),
        pytest.raises(InputError, match=r"'broken' \(plugin_broken\) cannot be imported: ModuleNotFoundError"),
    ):
        ROUTERS.get("broken")


def test_folders_alone_may_be_alternatives(tmp_path: Path) -> None:
    """The modules beside the folders of engines are what they share."""
    engines = Registry("windtunnel.test_kind", "windtunnel.serving.engines", "engine", folders=True)
    assert engines.shipped == ("sglang", "trtllm", "vidur", "vllm")
    folder = engines.folder("vllm")
    assert folder is not None
    assert (folder / "defaults.yaml").is_file()
    with installed_plugin(tmp_path, "windtunnel.test_kind", "sticky", "raise ImportError\n"):
        assert engines.folder("sticky") == tmp_path


BROKEN = {"import no_such_module\n": "cannot be imported: ModuleNotFoundError", "X = 1\n": "defines no "}
"""Source of a broken plug-in -> what a command says of it."""
GROUPS = ("attention", "feed_forward", "traces", "formats", "collectives", "estimators", "network_backends", "engines")


@pytest.mark.parametrize("source", BROKEN)
def test_a_broken_package_stops_only_what_needs_it(tmp_path: Path, source: str) -> None:
    needing = Registry("windtunnel.test_kind", "windtunnel.compiled", "test kind", "ANSWER")
    with installed_plugin(tmp_path, "windtunnel.test_kind", "broken", source):
        with pytest.warns(UserWarning, match=rf"the test kind 'broken' \(plugin_broken\) {BROKEN[source]}.*left out"):
            assert list(needing.every()) == list(needing.shipped)
        needing.every()  # warns once
        with pytest.raises(InputError, match=BROKEN[source]):
            needing.get("broken")


@pytest.mark.full
@pytest.mark.parametrize("source", BROKEN)
def test_commands_go_on_beside_broken_packages(tmp_path: Path, source: str) -> None:
    """Kinds of layers, trace layouts and formats are all asked which of them a file is of."""
    trace = tmp_path / "requests.csv"
    trace.write_text("arrival_s,input_tokens,output_tokens\n0,100,3\n1,200,4\n")
    program = ["simulate", "--model", "llama-3.1-8b", "--device", "h100_sxm", "--trace", str(trace)]
    with ExitStack() as packages:
        for group in GROUPS:
            folder = tmp_path / group
            folder.mkdir()
            packages.enter_context(installed_plugin(folder, f"windtunnel.{group}", f"broken_{group}", source))
        told = packages.enter_context(pytest.warns(UserWarning, match="it is left out"))
        assert run(program) == 0
        assert run(["catalog", "models", "--json"]) == 0
    left_out = [str(warning.message).partition(" 'broken_")[0] for warning in told]
    assert sorted(left_out) == ["the kind of attention", "the kind of feed-forward", "the trace layout"]


def test_what_is_of_another_kind_is_left_out(tmp_path: Path) -> None:
    needing = Registry("windtunnel.test_kind", None, "test kind", "ANSWER")
    with installed_plugin(tmp_path, "windtunnel.test_kind", "odd", "ANSWER = 42\n"):
        assert list(needing.every(int)) == ["odd"]
        with pytest.warns(UserWarning, match="ANSWER of the test kind 'odd' is no str; it is left out"):
            assert needing.every(str) == {}


def test_a_failure_inside_a_package_is_no_bug_of_ours(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = "OPERATIONS = ('all_reduce',)\ndef flows(call):\n    raise ValueError('oops')\n"
    arguments = ["collective", "--op", "all_reduce", "--size", "1MiB", "--topology", "dgx_h100", "--backend", "flow"]
    with installed_plugin(tmp_path, "windtunnel.collectives", "odd", source):
        assert run([*arguments, "--algorithm", "odd"]) == 2
    told = capsys.readouterr().err
    assert "an installed package failed in plugin_odd, line 3: ValueError: oops" in told


COLLECTIVE = ["collective", "--op", "all_reduce", "--size", "1MiB", "--topology", "dgx_h100"]
FLOWS = "OPERATIONS = ('all_reduce',)\n"
BREACHES = {
    ("collectives", "flows"): {
        FLOWS: "defines no function flows",
        FLOWS + "def flows(): return 1\n": r"cannot be called: flows\(\) takes 0 positional arguments but 1 was given",
        FLOWS + "def flows(call): return [1]\n": r"returned \[1\] from flows, not a Flows",
    },
    ("network_backends", "run_flows"): {
        "run_flows = 5\n": "defines no function run_flows",
        "def run_flows(*_): return 1.5\n": r"returned 1\.5 from run_flows, not a FlowTimes",
    },
}
"""Group and function -> source of a plug-in that breaks its contract -> what a command says of it."""


@pytest.mark.parametrize(("kind", "source"), [(kind, source) for kind in BREACHES for source in BREACHES[kind]])
def test_what_breaks_its_contract_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: tuple[str, str], source: str
) -> None:
    option = {"collectives": ["--backend", "flow", "--algorithm", "odd"], "network_backends": ["--backend", "odd"]}
    arguments = [*COLLECTIVE, *option[kind[0]]]
    with installed_plugin(tmp_path, f"windtunnel.{kind[0]}", "odd", source):
        assert run(arguments) == 2
    told = capsys.readouterr().err
    assert re.search(rf"^error: the .* 'odd' \(plugin_odd\) {BREACHES[kind][source]}$", told, re.MULTILINE)


NUMBERS = {
    ("collectives", "OPERATIONS = 5\n"): "OPERATIONS of the algorithm 'odd' is 5, not a tuple",
    (
        "collectives",
        FLOWS + "CLOSED_FORM = 5\n",
    ): "CLOSED_FORM of the collective algorithm 'odd' is 5, not a ClosedForm",
    (
        "network_backends",
        "def run_flows(*_): return 0\ndef total_seconds(*_): return -1.0\n",
    ): "the time of all flows by the network backend 'odd' is -1.0; a number of at least 0 is needed",
    (
        "network_backends",
        "def run_flows(*_): return 0\ndef ring_seconds(*_): return 'soon'\n",
    ): "the time of ring by the network backend 'odd' is 'soon'; a number of at least 0 is needed",
}
"""Group and source of a plug-in with a wrong value -> what a command says of it."""


@pytest.mark.parametrize(("group", "source"), NUMBERS)
def test_a_wrong_value_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], group: str, source: str) -> None:
    option = ["--algorithm", "odd"] if group == "collectives" else ["--backend", "odd"]
    if "total_seconds" in source:
        option += ["--algorithm", "tree"]
    with installed_plugin(tmp_path, f"windtunnel.{group}", "odd", source):
        assert run([*COLLECTIVE, *option]) == 2
    assert f"error: {NUMBERS[group, source]}\n" in capsys.readouterr().err


def test_formats_are_all_of_their_kind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "odd.txt"
    file.write_text("#odd\n")
    head = "from windtunnel.formats.recognise import FileFormat\n"
    unknown = f"{head}FORMATS = [FileFormat('odd', 'jobs', any, any)]\n"
    told = {"FORMATS = (5,)\n": "is no FileFormat", unknown: "there is no use 'jobs' of a file"}
    for number, (source, words) in enumerate(told.items()):
        folder = tmp_path / str(number)
        folder.mkdir()
        with installed_plugin(folder, "windtunnel.formats", "odd", source), pytest.warns(UserWarning, match=words):
            assert run(["workload", str(file)]) == 2
    assert "is no workload or trace that is known" in capsys.readouterr().err
