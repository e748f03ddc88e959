from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windtunnel.errors import InputError
from windtunnel.formats.aicb.csv_records import (
    COLUMNS,
    GROUPS,
    KINDS,
    Record,
    RecordList,
    Stretch,
    read_records,
    records_text,
)

LINE = "CommType.all_reduce,CommGroup.dp_group,8,4096,step,None,None,,None,None,None,1"

numbers = st.integers(0, 2**40)
shapes = st.tuples(
    st.lists(st.integers(1, 9), min_size=2, max_size=3).map(tuple), st.tuples(st.integers(1, 9), st.integers(1, 9))
)
maybe = st.one_of(st.none(), numbers)
times = st.one_of(st.none(), st.floats(0.001, 1e6))
records = st.builds(
    Record,
    st.sampled_from(KINDS),
    st.one_of(st.none(), st.sampled_from(GROUPS)),
    maybe,
    st.one_of(numbers, shapes),
    st.sampled_from(["", "forward.MoE.dispatch"]),
    maybe,
    maybe,
    st.sampled_from(["", "recv_prev"]),
    times,
    times,
    times,
    st.integers(1, 9),
)
stretches = st.lists(st.builds(Stretch, st.lists(records, max_size=3).map(tuple), st.integers(1, 3)), max_size=3)


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "records.csv"
    path.write_text(text)
    return path


@pytest.mark.full
@given(st.lists(stretches.map(tuple), min_size=1, max_size=3))
def test_what_is_written_is_read_back(
    tmp_path_factory: pytest.TempPathFactory, found: list[tuple[Stretch, ...]]
) -> None:
    one_rank = len(found) == 1
    lists = [RecordList(s, "" if one_rank else f"[ pp_stage{stage}: [rank0] ]") for stage, s in enumerate(found)]
    text = records_text(lists)
    again = read_records(written(tmp_path_factory.mktemp("r"), text))
    assert [part.title for part in again] == [part.title for part in lists]
    assert [list(part.records()) for part in again] == [list(part.records()) for part in lists]
    assert [part.num_records for part in again] == [part.num_records for part in lists]
    assert records_text(again) == text


def test_files_of_2024_name_their_ranks_and_hold_a_list_for_each_stage(tmp_path: Path) -> None:
    text = (
        f"[ pp_stage0: [rank0, rank1] ]\n{COLUMNS}\n{LINE}\n[ pp_stage1: [rank2, rank3] ]\n{COLUMNS}\n{LINE}\n{LINE}\n"
    )
    first, second = read_records(written(tmp_path, text))
    assert (first.title, first.num_records) == ("[ pp_stage0: [rank0, rank1] ]", 1)
    assert (second.title, second.num_records) == ("[ pp_stage1: [rank2, rank3] ]", 2)


def test_measured_times_and_products_are_read(tmp_path: Path) -> None:
    timed = "CommType.all_gather,CommGroup.tp_group,2,16777216,forward,None,None,,0.14028799533843994,119.59,104.64,1"
    product = (
        "CommType.computation,None,None,((4096 1 640) (640 5120)),forward.MegatronRowLinear,None,None,,None,None,None,1"
    )
    fraction = "CommType.all_to_all,CommGroup.ep_group,None,25952256.0,forward.MoE.dispatch,None,None,,None,None,None,1"
    (listed,) = read_records(written(tmp_path, f"{COLUMNS}\n{timed}\n{product}\n{fraction}\n"))
    first, second, third = listed.records()
    assert (first.elapsed_ms, first.bus_bandwidth) == (0.14028799533843994, 104.64)
    assert second.size == ((4096, 1, 640), (640, 5120))
    assert isinstance(third.size, float)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no AICB list"),
        ("a,b,c\n1,2,3\n", "line 1 is not the header of an AICB list: 'a,b,c'"),
        (f"[rank0 ~ rank7]\n{LINE}\n", "line 2 is not the header"),
        (f"{COLUMNS}\n{LINE[:-2]}", "line 2 has 11 columns; an AICB list has 12"),
        (f"{COLUMNS}\n{LINE.replace('all_reduce', 'allreduce')}", "did you mean all_reduce"),
        (f"{COLUMNS}\n{LINE.replace('dp_group', 'dq_group')}", "did you mean dp_group"),
        (f"{COLUMNS}\n{LINE.replace('4096', '4 KB')}", "msg_size is '4 KB'; a number is needed"),
        (f"{COLUMNS}\n{LINE.replace('4096', '-1')}", "msg_size is -1; at least 0"),
        (f"{COLUMNS}\n{LINE.replace('4096', 'None')}", "msg_size is None"),
        (f"{COLUMNS}\n{LINE.replace('4096', '((1 2) (x 3))')}", "a number is needed"),
        (f"{COLUMNS}\n{LINE.replace(',8,', ',8.5,')}", "comm_group_size is 8.5; a whole number is needed"),
    ],
)
def test_wrong_files_are_refused_by_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        read_records(written(tmp_path, text))
    assert message in f"{caught.value.message}; {caught.value.hint}"
