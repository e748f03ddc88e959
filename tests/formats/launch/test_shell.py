"""Scripts as a shell runs them: conditions, arrays, files and lines that go on."""

import pytest

from windtunnel.errors import InputError
from windtunnel.formats.launch import shell
from windtunnel.formats.launch.containers import commands_of
from windtunnel.formats.launch.read import read_launch_command


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


@pytest.mark.parametrize("words", ['"([0]*1+[1]*26)"', "'a) b'", "$((2 * (3 + 4)))", '"a\\")"'])
def test_an_array_may_hold_parentheses(words: str) -> None:
    assert served(f"A=(--x {words} --y)\nserve ${{A[@]}}") == served(f"serve --x {words} --y")


def test_an_array_that_is_none_is_refused() -> None:
    with pytest.raises(InputError, match="No closing quotation in the command line"):
        commands_of("A=(it's)\nserve")
    doubled = 'A=("${A[@]}" "${A[@]}")\n' * 20
    with pytest.raises(InputError, match="an array of 16,384 words; 10,000 at most are read"):
        commands_of(f"A=(x)\n{doubled}serve")


APPENDED = """
CONFIG=/tmp/extra.yml
cat > $CONFIG <<EOF
kv_cache_config: {free_gpu_memory_fraction: 0.8}
EOF
if [[ "$WAITS" == "true" ]]; then
    cat << EOF >> $CONFIG
batch_wait_timeout_iters: 40
EOF
fi
echo 'disable_overlap_scheduler: true' >> $CONFIG
trtllm-serve llama-3.1-8b --config $CONFIG > "$LOG" 2>&1 &
"""


@pytest.mark.parametrize(("waits", "more"), [("true", {"batch_wait_timeout_iters": 40}), ("false", {})])
def test_a_file_holds_what_the_script_wrote_to_it_until_then(waits: str, more: dict[str, object]) -> None:
    engine = read_launch_command(f"WAITS={waits}\n{APPENDED}").raw["deployment"]["engine"]
    assert engine == {"name": "trtllm", "gpu_memory_utilization": 0.8, "async_scheduling": False} | more


def test_a_file_that_a_script_in_a_container_writes_is_read() -> None:
    script = "cat > /c/x.yaml <<EOF\nmax-num-seqs: 32\nEOF\nexec vllm serve llama-3.1-8b --config /c/x.yaml"
    assert read_launch_command(f"sh -c '{script}'").raw["deployment"]["engine"]["max_num_seqs"] == 32


@pytest.mark.parametrize(
    "text",
    [
        'if [ -z "$(ls -A "$HOME" 2>/dev/null)" ]; then echo; fi\nvllm serve llama-3.1-8b --max-num-seqs 32',
        "vllm serve llama-3.1-8b `\n  --max-num-seqs 32",
        "vllm serve llama-3.1-8b ^\r\n  --max-num-seqs 32",
        "cat > run.sh <<'EOF'\nexec vllm serve llama-3.1-8b --max-num-seqs 32\nEOF\nbash run.sh",
    ],
)
def test_commands_are_read_as_their_shell_reads_them(text: str) -> None:
    reading = read_launch_command(text)
    assert (reading.raw["model"], reading.engine["max_num_seqs"]) == ("llama-3.1-8b", 32)


@pytest.mark.parametrize(
    "start", ["$CMD --tp 2", "eval $CMD --tp 2", 'eval "$CMD --tp 2"', 'sh -c "$CMD --tp 2"', "nohup ${CMD} --tp 2 &"]
)
def test_a_variable_may_hold_a_command(start: str) -> None:
    assert served(f'CMD="serve --model ${{M:=small}}"\n{start}') == ["--model small --tp 2"]


def test_a_variable_that_holds_itself_ends() -> None:
    assert served('CMD="$CMD serve"\n$CMD\nserve --tp 2') == ["--tp 2"]


def test_slurm_sets_variables() -> None:
    lines = "#SBATCH --nodes=4 --time=01:00:00\n#SBATCH --ntasks-per-node=8 # one a GPU\n#SBATCH --gres=gpu:h100:8\n"
    said = dict(line.split("=") for line in shell.of_slurm(lines).splitlines())
    assert said["SLURM_NNODES"] == said["SLURM_JOB_NUM_NODES"] == "4"
    assert (said["SLURM_NTASKS"], said["SLURM_GPUS_ON_NODE"]) == ("32", "8")
    assert shell.of_slurm("echo 1") == ""
