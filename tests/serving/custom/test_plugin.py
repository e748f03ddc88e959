"""A router and a scheduler of an installed package are chosen by name, in the same words as the shipped ones."""

from pathlib import Path

import numpy as np
import pytest

import windtunnel as wt
from plugin_package import installed_plugin
from windtunnel.errors import InputError

STICKY = '''
def route(request, replicas):
    """Even requests go to the first replica, odd ones to the last that is up."""
    up = [i for i, is_up in enumerate(replicas.is_up) if is_up]
    return up[-1] if request.number % 2 else up[0]
'''

WHOLE = '''
def form(requests, waiting, ready, engine):
    """Decode everything, and one whole prompt."""
    batch = [(i, 1) for i in ready]
    if len(waiting) and engine.num_running < engine.max_num_seqs:
        batch.append((waiting[0], requests.prompt_tokens[waiting[0]]))
    return batch
'''


def served(**settings: object) -> wt.Result:
    return wt.simulate(
        wt.scenario(
            model="llama-3.1-8b", device="h100_sxm", rate_per_s=10, num_requests=40, input_tokens=100, output_tokens=20,
            settings={f"deployment.{name}": value for name, value in settings.items()},
        )
    )  # fmt: skip


def test_a_router_is_one_file(tmp_path: Path) -> None:
    with installed_plugin(tmp_path, "windtunnel.routers", "even_odd", STICKY, "route") as files:
        result = served(router="even_odd", replicas=3)
    assert len(files) == 1
    np.testing.assert_array_equal(result.requests["replica"], np.arange(40) % 2 * 2)
    assert result.scenario.deployment.router == "even_odd"


@pytest.mark.interpreted
def test_a_scheduler_is_one_file(tmp_path: Path) -> None:
    with installed_plugin(tmp_path, "windtunnel.schedulers", "whole_prompts", WHOLE, "form") as files:
        result = served(**{"engine.scheduler": "whole_prompts"})
    assert len(files) == 1
    assert set(result.steps["prefill_tokens"].tolist()) == {0, 100}
    assert result.summary.checks is not None
    assert result.summary.checks.passed


@pytest.mark.parametrize(
    ("group", "name", "settings"),
    [("routers", "deferred", {"router": "deferred"}), ("schedulers", "sarathi", {"engine.scheduler": "sarathi"})],
)
def test_a_shipped_name_is_refused(tmp_path: Path, group: str, name: str, settings: dict[str, object]) -> None:
    with (
        installed_plugin(tmp_path, f"windtunnel.{group}", name, "def choose(*_):\n    return 0\n", "choose"),
        pytest.raises(InputError, match=f"'{name}' of 'plugin_{name}:choose' has the name of a shipped one"),
    ):
        served(**settings)


def test_an_unknown_router_is_refused_with_the_installed_ones(tmp_path: Path) -> None:
    with (
        installed_plugin(tmp_path, "windtunnel.routers", "even_odd", STICKY, "route"),
        pytest.raises(InputError, match=r"router is 'even_old', which is not known(.|\n)*did you mean even_odd"),
    ):
        served(router="even_old")


def test_an_unknown_scheduler_is_refused_with_the_installed_ones(tmp_path: Path) -> None:
    with (
        installed_plugin(tmp_path, "windtunnel.schedulers", "whole_prompts", WHOLE, "form"),
        pytest.raises(InputError, match="there is no scheduler 'unlike'") as refused,
    ):
        served(**{"engine.scheduler": "unlike"})
    assert "whole_prompts, module:function" in str(refused.value.hint)


def test_a_function_of_other_arguments_is_named_without_a_place_of_ours(tmp_path: Path) -> None:
    with (
        installed_plugin(tmp_path, "windtunnel.routers", "none", "def route():\n    return 0\n", "route"),
        pytest.raises(InputError, match="takes 0 positional arguments but 2 were given") as refused,
    ):
        served(router="none", replicas=2)
    assert refused.value.hint is None


CLASS = "class Sticky:\n    def __call__(self, request, replicas):\n        return 0\n"


@pytest.mark.parametrize(("attribute", "kind"), [("", "of type module"), ("Sticky", "a class")])
def test_what_is_no_function_is_named(tmp_path: Path, attribute: str, kind: str) -> None:
    with (
        installed_plugin(tmp_path, "windtunnel.routers", "sticky", CLASS, attribute),
        pytest.raises(InputError, match=f"the router 'sticky' is {kind}, not a function"),
    ):
        served(router="sticky", replicas=2)


@pytest.mark.interpreted
def test_a_function_cannot_change_the_arrays_of_the_loop(tmp_path: Path) -> None:
    changing = "def form(requests, waiting, ready, engine):\n    {}\n    return []\n"
    router = "def route(request, replicas):\n    replicas.num_waiting[0] = 5\n    return 0\n"
    for number, (group, source, settings) in enumerate(
        [
            ("schedulers", changing.format("requests.num_blocks[0] = 3"), {"engine.scheduler": "odd"}),
            ("schedulers", changing.format("waiting[0] = ready[:1] = 3"), {"engine.scheduler": "odd"}),
            ("routers", router, {"router": "odd", "replicas": 2}),
        ]
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        function = source.partition("(")[0].removeprefix("def ")
        with (
            installed_plugin(folder, f"windtunnel.{group}", "odd", source, function),
            pytest.raises(InputError, match="read-only") as refused,
        ):
            served(**settings)
        assert refused.value.hint == "plugin_odd.py, line 2"


@pytest.mark.full
@pytest.mark.compiled
def test_an_error_of_the_compiler_is_one_sentence_and_a_place(tmp_path: Path) -> None:
    source = "from numba import njit\n\n\n@njit\ndef route(request, replicas):\n    return replicas.num_waitin[0]\n"
    with (
        installed_plugin(tmp_path, "windtunnel.routers", "odd", source, "route"),
        pytest.raises(InputError, match="the router route failed") as refused,
    ):
        served(router="odd", replicas=2)
    assert not {"\n", "\x1b"} & set(refused.value.message)
    assert refused.value.hint == "plugin_odd.py, line 4"
