import pytest

from windtunnel.errors import InputError, MissingExtraError, WindtunnelError, did_you_mean

MODELS = ["meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-70B", "Qwen/Qwen3-8B"]


def test_the_nearest_word_whatever_the_case() -> None:
    assert did_you_mean("H100-sxm", ["h100_sxm", "t4"]) == "did you mean h100_sxm?"


def test_a_name_without_its_organisation() -> None:
    hint = did_you_mean("qwen3-8b", MODELS)
    assert hint is not None
    assert "Qwen/Qwen3-8B" in hint


def test_several_near_words_are_joined() -> None:
    hint = did_you_mean("meta-llama/Llama-3.1-7B", MODELS)
    assert hint is not None
    assert " or " in hint


def test_nothing_near_gives_the_fallback() -> None:
    assert did_you_mean("zzzz", MODELS) is None
    assert did_you_mean("zzzz", MODELS, "look at the list") == "look at the list"
    assert did_you_mean("zzzz", []) is None


@pytest.mark.parametrize(("error", "code"), [(WindtunnelError("x"), 1), (InputError("x"), 2)])
def test_exit_codes(error: WindtunnelError, code: int) -> None:
    assert error.exit_code == code
    assert (str(error), error.hint) == ("x", None)


def test_a_missing_extra_says_what_to_install() -> None:
    error = MissingExtraError("pandas", "pandas")
    assert error.hint == "pip install 'windtunnel[pandas]'"
    assert isinstance(error, InputError)
