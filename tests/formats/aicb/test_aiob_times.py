from pathlib import Path

import pytest

from windtunnel.errors import InputError
from windtunnel.formats.aicb.aiob_times import ModuleTime, inference_ns, read_aiob_times, training_ns

SECTION = "Emb:\n    time_gpu_max: 857\n    time_gpu_min: 782\n    time_gpu_avg: 799\n"


def refused(tmp_path: Path, text: str) -> str:
    path = tmp_path / "times.txt"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        read_aiob_times(path)
    return caught.value.message


def test_the_shipped_example_is_read(reference: Path) -> None:
    times = read_aiob_times(reference / "aicb" / "aiob_Example.txt")
    assert times.modules["Emb"] == ModuleTime(857, 782, 799)


def test_aicb_adds_modules_up_in_nanoseconds(reference: Path) -> None:
    times = read_aiob_times(reference / "aicb" / "aiob_Example.txt")
    times_ns = training_ns(times, recompute=False)
    # Published with AICB's own output for this file.
    assert (times_ns["attention_forward"], times_ns["mlp_backward"]) == (1_820_000, 2_478_000)
    assert (times_ns["grad_forward"], times_ns["grad_backward"], times_ns["Emb"]) == (16_647_000, 17_374_000, 799_000)
    assert times_ns["attention_o_row"] == 0
    assert training_ns(times, recompute=True)["attention_forward"] == 1_820_000 + 512_000


def test_inference_modules_are_found_by_their_names(tmp_path: Path) -> None:
    names = ("atten_norm", "atten_gdn", "atten_flash", "moe_norm", "moe_route", "moe_down", "mlp_up", "else")
    path = tmp_path / "times.txt"
    sections = [SECTION.replace("Emb", name).replace("799", str(place)) for place, name in enumerate(names, 1)]
    path.write_text("inference_term:decode\n" + "".join(sections))
    assert inference_ns(read_aiob_times(path)) == {
        "attention_norm": 1000,
        "attention_gdn": 2000,
        "attention_layer": 3000,
        "moe_norm": 4000,
        "moe_route": 5000,
        "moe_expert": 6000,
        "mlp": 7000,
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not an AIOB file"),
        ("{}", "is not an AIOB file"),
        ("train_iter:10\n    time_gpu_avg: 3\n", "line 2 stands before the first section"),
        (f"train_iter:10\n{SECTION}what is this\n", "line 6 is no section"),
        (f"train_iter:10\n{SECTION}    time_gpu_p99: 3\n", "line 6: 'time_gpu_p99' is no time"),
        ("train_iter:10\n" + SECTION.replace("799", "fast"), "line 5: time_gpu_avg is 'fast'"),
        ("train_iter:10\n" + SECTION.replace("799", "-1"), "line 5: time_gpu_avg is -1; at least 0"),
        ("train_iter:10\nEmb:\n    time_gpu_max: 857\n", "the section Emb has no time_gpu_min and no time_gpu_avg"),
    ],
)
def test_wrong_files_are_refused_by_line(tmp_path: Path, text: str, message: str) -> None:
    assert message in refused(tmp_path, text)
