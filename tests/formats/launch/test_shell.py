"""Scripts as a shell runs them: conditions and arrays."""

import pytest

from windtunnel.errors import InputError
from windtunnel.formats.launch.containers import commands_of


def served(script: str) -> list[str]:
    """The options of the servers that a script starts."""
    return [" ".join(each.words[1:]) for each in commands_of(script) if each.words[0] == "serve"]


@pytest.mark.parametrize(
    ("condition", "holds"),
    [
        ('[ "$A" = "1" ]', True),
        ('[ "$A" = "2" ]', False),
        ("[[ $A != 2 ]]", True),
        ('[ "$A" = 1 ] && [ "$B" = 2 ]', False),
        ('[ "$A" = 1 ] || [ "$B" = 2 ]', True),
        ('[[ "$A" == 1 && "$B" == 8 ]]', True),
        ('[ "$UNSET" = "true" ]', False),
        ('[ -z "$UNSET" ]', True),
        ('[ -n "${UNSET:-x}" ]', True),
        ("! [ $A = 1 ]", False),
        ("[ $B -ge 8 ]", True),
        ("[ $B -lt 8 ]", False),
        ("[[ $NAME == /* ]]", True),
    ],
)
def test_the_branch_that_is_not_taken_starts_nothing(condition: str, holds: bool) -> None:
    script = f"A=1\nB=8\nNAME=/m/x\nX=0\nif {condition}; then\n  X=1\nelse X=2\nfi\nserve --size $X"
    assert served(script) == [f"--size {1 if holds else 2}"]


def test_the_first_branch_whose_condition_holds_is_taken() -> None:
    branches = 'if [ "$A" = 1 ]; then serve one; elif [ "$A" = 2 ]; then serve two; else serve three; fi\nserve four'
    assert served(f"A=1\n{branches}") == ["one", "four"]
    assert served(f"A=2\n{branches}") == ["two", "four"]
    assert served(f"A=3\n{branches}") == ["three", "four"]
    inner = f"if [ x = y ]; then\n{branches}\nfi"
    assert served(f"A=1\n{inner}\nserve five") == ["five"]


@pytest.mark.parametrize("condition", ["grep -q a b", "[ -f /etc/x ]", "[ $UNSET -gt 1 ]", "command -v nvidia-smi"])
def test_of_an_unknown_condition_all_branches_are_read(condition: str) -> None:
    assert served(f"if {condition}; then serve one; else serve two; fi") == ["one", "two"]


def test_an_array_has_the_words_of_the_branches_that_are_taken() -> None:
    script = """ARGS=(--tp "$TP")
if [ "$EP" = true ]; then
  ARGS+=(--ep 8)
else
  ARGS+=(--dp 2)
fi
CMD=(serve "two words" "${ARGS[@]}")
"${CMD[@]}" --last
"""
    assert served(f"TP=4\nEP=true\n{script}") == ["two words --tp 4 --ep 8 --last"]
    assert served(f"TP=4\n{script}") == ["two words --tp 4 --dp 2 --last"]
    assert served('A=(x)\nA=("${A[@]}" "${A[@]}" y)\nserve "${A[@]}" "${B[@]}"') == ["x x y ${B[@]}"]


def test_an_array_that_is_none_is_refused() -> None:
    with pytest.raises(InputError, match="No closing quotation in the command line"):
        commands_of("A=(it's)\nserve")
    doubled = 'A=("${A[@]}" "${A[@]}")\n' * 20
    with pytest.raises(InputError, match="an array of 16,384 words; 10,000 at most are read"):
        commands_of(f"A=(x)\n{doubled}serve")
