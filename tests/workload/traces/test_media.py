"""Images and videos of the requests of a trace: what is read, what is refused, and what a model makes of them."""

import csv
import io
import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from windtunnel import catalog
from windtunnel.errors import InputError
from windtunnel.model.towers import VisionTower
from windtunnel.serving.scenario import Scenario, scenario_from
from windtunnel.workload.generate.requests import RequestArrays, generate
from windtunnel.workload.schema import Trace, TraceColumns
from windtunnel.workload.traces.requests import RecordedRequests, read_requests

MODEL = "Qwen/Qwen3-VL-8B-Instruct"
CAT, DOG = {"width": 1024, "height": 768, "id": "cat"}, [512, 512, "dog"]
VIDEO = {"width": 640, "height": 360, "seconds": 10, "fps": 2}


def rows_of(*media: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"arrival_s": float(i), "input_tokens": 100, "output_tokens": 20} | each for i, each in enumerate(media)]


def write(path: Path, *media: dict[str, Any]) -> Path:
    """Write a trace whose requests have `media`, a request each, in the format of the path's ending."""
    rows = rows_of(*media)
    if path.suffix == ".parquet":
        parquet.write_table(pa.Table.from_pylist(rows), path)
        return path
    if path.suffix == ".csv":
        text = io.StringIO()
        writer = csv.DictWriter(text, list(dict.fromkeys(key for row in rows for key in row)))
        writer.writeheader()
        writer.writerows(rows)
        path.write_text(text.getvalue())
        return path
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def items_of(path: Path, **given: Any) -> list[list[tuple[int, int, int, int]]]:
    """The (frames, width, height, number) of each request."""
    recorded = read_requests(Trace(path=str(path), **given))
    if recorded.media is None:
        return [[] for _ in range(recorded.num_requests)]
    return rows_as_lists(recorded)


def rows_as_lists(recorded: RecordedRequests) -> list[list[tuple[int, int, int, int]]]:
    assert recorded.media is not None
    bounds = recorded.media.offsets.tolist()
    items = [(row[0], row[1], row[2], row[3]) for row in recorded.media.items.tolist()]
    return [items[begin:end] for begin, end in pairwise(bounds)]


def scenario_of(path: Path, model: Any = MODEL, trace: dict[str, Any] | None = None, **load: Any) -> Scenario:
    workload = {"trace": {"path": str(path), **(trace or {})}} | load
    return scenario_from({"model": model, "deployment": {"device": "h100_sxm"}, "workload": workload})


def requests_of(*args: Any, **named: Any) -> RequestArrays:
    scenario = scenario_of(*args, **named)
    return generate(scenario.workload, scenario.seed)


BOTH = [{"images": [CAT, DOG]}, {}, {"images": []}, {"images": [[1024, 768]], "videos": [VIDEO]}, {"images": [CAT]}]
BOTH_READ = [
    [(0, 1024, 768, 0), (0, 512, 512, 1)],
    [],
    [],
    [(0, 1024, 768, -1), (20, 640, 360, -1)],
    [(0, 1024, 768, 0)],
]


@pytest.mark.parametrize("ending", ["jsonl", "json", "csv"])
def test_lists_of_images_and_videos(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"trace.{ending}"
    if ending == "json":
        path.write_text(json.dumps(rows_of(*BOTH)))
    elif ending == "csv":
        write(path, *[{key: json.dumps(value) for key, value in each.items()} for each in BOTH])
    else:
        write(path, *BOTH)
    assert items_of(path) == BOTH_READ


def test_lists_of_parquet(tmp_path: Path) -> None:
    images = [[CAT], None, [{"width": 512, "height": 512, "id": None}]]
    path = write(tmp_path / "trace.parquet", *[{"images": each} for each in images])
    assert items_of(path) == [[(0, 1024, 768, 0)], [], [(0, 512, 512, -1)]]


def test_columns_of_a_number_and_a_size(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(
        "arrival_s,input_tokens,output_tokens,num_images,image_width,image_height,image_id\n"
        "0,100,20,1,1024,768,cat\n1,100,20,,,,\n2,100,20,2,512,512,\n3,100,20,0,9,9,\n4,100,20,1,1024,768,cat\n"
    )
    cat, small = (0, 1024, 768, 0), (0, 512, 512, -1)
    assert items_of(path) == [[cat], [], [small, small], [], [cat]]
    renamed = tmp_path / "renamed.csv"
    renamed.write_text("t,in,out,pictures,w,h\n0,100,20,1,1024,768\n1,100,20,,,\n")
    names = {"arrival": "t", "input_tokens": "in", "output_tokens": "out"}
    named = TraceColumns(**names, num_images="pictures", image_width="w", image_height="h")
    assert items_of(renamed, columns=named) == [[(0, 1024, 768, -1)], []]
    assert items_of(renamed, columns=TraceColumns(**names)) == [[], []]


def test_other_layouts_and_conversations_have_images_too(tmp_path: Path) -> None:
    mooncake = tmp_path / "mooncake.jsonl"
    row = {"timestamp": 0, "input_length": 600, "output_length": 20, "hash_ids": [1, 2], "images": [CAT]}
    mooncake.write_text(json.dumps(row) + "\n")
    assert items_of(mooncake) == [[(0, 1024, 768, 0)]]
    talks = tmp_path / "talks.json"
    said = [{"from": "human", "value": "What is this?"}, {"from": "gpt", "value": "A cat."}]
    conversations = [
        {"conversations": said[:1], "images": [DOG]},
        {"conversations": said, "images": [CAT]},
        {"conversations": said},
    ]
    talks.write_text(json.dumps(conversations))
    recorded = read_requests(Trace(path=str(talks), characters_per_token=4), ("input_tokens", "output_tokens"))
    assert rows_as_lists(recorded) == [[(0, 1024, 768, 1)], []]


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "negative width": ({"images": [[-5, 768]]}, "row 2: width in images is not a whole number from 1 to 100,000: -5"),
    "one side": ({"images": [[1024]]}, r"row 2: images has no list of sizes: \[1024\]"),
    "four numbers": ({"images": [[1, 2, 3, 4]]}, "row 2: images has no list of sizes"),
    "one size, not a list": ({"images": [1024, 768]}, "row 2: images has no list of sizes: 1024"),
    "a number": ({"images": 3}, "images has no list of sizes: 3"),
    "files": ({"images": ["cat.png"]}, "row 2: images has no list of sizes: cat.png"),
    "text": ({"images": [["a", 5]]}, "row 2: width in images is not a whole number .*: a"),
    "not a number": ({"images": [[True, 5]]}, "row 2: width in images is not a whole number .*: True"),
    "a key": ({"images": [CAT | {"detail": "low"}]}, "row 2: images has an unknown key 'detail'"),
    "no height": ({"images": [{"width": 5}]}, "row 2: images has no list of sizes"),
    "another size": ({"images": [{"width": 5, "height": 6, "id": "x"}, [6, 5, "x"]]}, "row 2: x in images has 6 x 5"),
    "no frames": ({"videos": [{"width": 5, "height": 6}]}, "row 2: a video needs either frames or seconds"),
    "seconds": ({"videos": [VIDEO | {"seconds": -1}]}, "row 2: seconds in videos is not positive: -1"),
    "half a frame": ({"videos": [{"width": 5, "height": 6, "frames": 1.5}]}, "row 2: frames in videos is not a whole"),
    "too many": ({"images": [[5, 5]] * 1001}, "row 2 has 1,001 images and videos, above 1,000"),
    "an id of lists": ({"images": [[5, 5, [1]]]}, r"row 2: id in images is not text or a number: \[1\]"),
    "a sizeless number": ({"num_images": 2}, "row 2: num_images is 2, and image_width is missing"),
    "a negative number": ({"num_images": -1}, "row 2: num_images is not a whole number from 0 to 1,000: -1"),
    "a missing width": (
        {"num_images": 1, "image_width": None, "image_height": 7},
        "row 2: num_images is 1, and image_width is missing",
    ),
    "no width": (
        {"num_images": 1, "image_width": 0, "image_height": 7},
        "row 2: width in images is not a whole number from 1 to 100,000: 0",
    ),
    "an id of two": (
        {"num_images": 2, "image_width": 7, "image_height": 7, "image_id": "a"},
        "row 2: num_images is 2 beside an id",
    ),
    "both": (
        {"num_images": 1, "image_width": 7, "image_height": 7, "images": [CAT]},
        "row 2: num_images is given beside images or videos",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_images_are_refused_with_their_row(tmp_path: Path, name: str) -> None:
    media, message = WRONG[name]
    path = write(tmp_path / "trace.jsonl", {}, media)
    with pytest.raises(InputError, match=message) as error:
        items_of(path)
    assert str(path) in error.value.message
    assert items_of(path, media="leave_out") == [[], []]


def test_images_that_only_later_rows_have_are_not_overlooked(tmp_path: Path) -> None:
    path = write(tmp_path / "trace.jsonl", *[{}] * 150, {"images": [CAT]})
    with pytest.raises(InputError, match="row 151 has images, which none of the first rows has") as error:
        items_of(path)
    assert error.value.hint == 'give the first row an empty list: "images": []'
    write(path, {"images": []}, *[{}] * 149, {"images": [CAT]})
    assert items_of(path)[-1] == [(0, 1024, 768, 0)]


# What a model makes of them


def test_tokens_follow_the_models_rule(tmp_path: Path) -> None:
    requests = requests_of(write(tmp_path / "trace.jsonl", *BOTH))
    video = 10 * 20 * 11  # pairs of frames, squares of 32 pixels
    assert requests.input_tokens.tolist() == [100 + 768 + 256, 100, 100, 100 + 768 + video, 100 + 768]
    assert requests.media is not None
    assert requests.media[0, :, 2].tolist() == [100, 868]
    assert requests.media[0, 0, 1] == requests.media[4, 0, 1] != requests.media[3, 0, 1]
    assert requests.remarks == ("3 of 5 requests have 4 images of 2 sizes and 1 video of 1 size; 1 are repeats",)
    others = requests_of(tmp_path / "trace.jsonl", images={"max_pixels": 256 * 1024, "tokens_per_image": None})
    assert others.input_tokens[0] == 100 + 18 * 13 + 256


def test_the_same_images_as_drawn_ones(tmp_path: Path) -> None:
    """A trace with the images that were drawn gives the same arrays."""
    sizes = [{"width": 1024, "height": 768}, {"width": 512, "height": 512}]
    load = {"arrivals": {"type": "static", "rate_per_s": 1}, "input_tokens": 100, "output_tokens": 20}
    for images in ({"count": 2, "sizes": sizes, "distinct": 3}, {"sizes": sizes, "distinct": 2, "position": "start"}):
        described = {"model": MODEL, "deployment": {"device": "h100_sxm"}}
        drawn = scenario_from({**described, "workload": {**load, "images": images, "num_requests": 9}})
        arrays = generate(drawn.workload, drawn.seed)
        assert arrays.media is not None
        media = [
            {"images": [[*sizes[kind].values(), f"picture {number}"] for kind, number, _ in row]}
            for row in arrays.media.tolist()
        ]
        seen = {"position": images.get("position", "end")}
        read = requests_of(write(tmp_path / "trace.jsonl", *media), images=seen)
        assert read.media is not None
        np.testing.assert_array_equal(read.input_tokens, arrays.input_tokens)
        np.testing.assert_array_equal(read.media[..., 2], arrays.media[..., 2])
        same = arrays.media[..., 1].ravel()
        again = read.media[..., 1].ravel()
        np.testing.assert_array_equal(same[:, None] == same, again[:, None] == again)
        assert (read.prefixes is None) == (arrays.prefixes is None)
        if arrays.prefixes is not None and read.prefixes is not None:
            assert read.prefixes.node_tokens.tolist() == arrays.prefixes.node_tokens.tolist()
            assert read.prefixes.request_node.tolist() == arrays.prefixes.request_node.tolist()


SIDES = st.integers(1, 2000)
ITEMS = st.lists(st.tuples(SIDES, SIDES, st.sampled_from([None, None, "a", "b"])), max_size=5)


@pytest.mark.full
@given(rows=st.lists(ITEMS, min_size=1, max_size=8), at_start=st.booleans(), includes=st.booleans())
def test_random_traces_against_a_plain_reader(
    tmp_path_factory: pytest.TempPathFactory, rows: list[list[Any]], at_start: bool, includes: bool
) -> None:
    tower = catalog.model(MODEL).vision
    assert tower is not None
    sizes: dict[str, tuple[int, int]] = {}
    images = [
        [[*sizes.setdefault(name, side), name] if name else [*side] for *side, name in each]  # type: ignore[arg-type]
        for each in rows
    ]
    images = [[item for item in each if max(item[:2]) <= 200 * min(item[:2])] for each in images]
    path = tmp_path_factory.mktemp("traces") / "trace.jsonl"
    text = [10 + sum(plain_tokens(tower, each)) * includes for each in images]
    write(path, *[{"images": each, "input_tokens": size} for each, size in zip(images, text, strict=True)])
    position = {"position": "start" if at_start else "end"} if any(images) else None
    load = {"images": position} if position else {}
    requests = requests_of(path, trace={"input_includes_media": includes}, **load)
    numbers: dict[Any, int] = {}
    for row, each in enumerate(images):
        tokens = plain_tokens(tower, each)
        assert requests.input_tokens[row] == 10 + sum(tokens)
        begin = 0 if at_start else 10
        for place, (item, size) in enumerate(zip(each, tokens, strict=True)):
            assert requests.media is not None
            kind, number, first = requests.media[row, place].tolist()
            assert (requests.media_tokens[kind], first) == (size, begin)
            begin += size
            name = item[2] if len(item) > 2 else (row, place)
            assert numbers.setdefault(name, number) == number
        if requests.media is not None:
            assert (requests.media[row, len(each) :] == -1).all()
    assert len(set(numbers.values())) == len(numbers)


def plain_tokens(tower: VisionTower, images: Sequence[Any]) -> list[int]:
    return [tower.image(item[0], item[1]).tokens for item in images]


def test_images_of_equal_patches_are_of_one_kind(tmp_path: Path) -> None:
    path = write(tmp_path / "trace.jsonl", {"images": [[1024, 768], [1020, 770], [768, 1024], [512, 512]]})
    requests = requests_of(path)
    assert requests.media is not None
    assert requests.media[0, :, 0].tolist() == [1, 1, 1, 0]
    assert requests.media_tokens == (256, 768)


def test_prompts_that_count_their_images(tmp_path: Path) -> None:
    path = write(tmp_path / "trace.jsonl", {"images": [CAT], "input_tokens": 900}, {"input_tokens": 30})
    requests = requests_of(path, trace={"input_includes_media": True})
    assert requests.input_tokens.tolist() == [900, 30]
    assert requests.media is not None
    assert requests.media[0, 0, 2] == 900 - 768
    write(path, {}, {"images": [CAT], "input_tokens": 768})
    with pytest.raises(InputError, match=r"row 2: 768 tokens of images and videos, and a prompt of 768 tokens"):
        requests_of(path, trace={"input_includes_media": True})


def test_rows_keep_their_images_in_any_order(tmp_path: Path) -> None:
    """A row that is drawn twice has the images with ids again, and others of equal size."""
    path = write(tmp_path / "trace.jsonl", *[{"images": [[256 * (i + 1), 256, f"i{i}"], [32, 32]]} for i in range(9)])
    arrivals = {"type": "static", "rate_per_s": 1}
    for order in ("shuffled", "resampled"):
        requests = requests_of(path, trace={"order": order}, arrivals=arrivals, num_requests=9)
        assert requests.media is not None
        tokens = np.array(requests.media_tokens)[requests.media[..., 0]]
        np.testing.assert_array_equal(requests.input_tokens, 100 + tokens.sum(axis=1))
        assert len(set(requests.media[:, 1, 1].tolist())) == 9
        assert len(set(requests.media[:, 0, 1].tolist())) == len(set(tokens[:, 0].tolist()))


def test_tenants_bring_images_of_their_own(tmp_path: Path) -> None:
    first = write(tmp_path / "first.jsonl", {"images": [CAT]}, {"images": [CAT]})
    other = write(tmp_path / "other.jsonl", {"images": [[64, 64, "cat"], [32, 32]]})
    tenants = [{"name": name, "trace": {"path": str(path)}} for name, path in (("a", first), ("b", other))]
    tenants.append(
        {"name": "c", "arrivals": {"type": "static", "rate_per_s": 1}, "input_tokens": 7, "output_tokens": 2}
    )
    described = {
        "model": MODEL,
        "deployment": {"device": "h100_sxm"},
        "workload": {"tenants": tenants, "duration_s": 1.5},
    }
    scenario = scenario_from(described)
    requests = generate(scenario.workload, scenario.seed)
    assert requests.media is not None
    assert requests.tenant is not None
    of_tenant = {
        name: requests.input_tokens[requests.tenant == index].tolist()
        for index, name in enumerate(requests.tenant_names)
    }
    assert of_tenant == {"a": [868, 868], "b": [100 + 64 + 64], "c": [7, 7]}
    cats = requests.media[requests.tenant == 0, 0, 1]
    assert cats[0] == cats[1] != requests.media[requests.tenant == 1, 0, 1][0]


def test_drawn_images_replace_those_of_the_trace(tmp_path: Path) -> None:
    path = write(tmp_path / "trace.jsonl", {"images": ["unreadable"]}, {})
    requests = requests_of(path, images={"width": 512, "height": 512})
    assert requests.input_tokens.tolist() == [356, 356]


@pytest.mark.parametrize(
    ("model", "media", "load", "message", "hint"),
    [
        ("Llama-3.1-8B", {"images": [CAT]}, {}, "row 2 has images or videos, but .* has no vision tower", "leave_out"),
        ("Llama-3.1-8B", {"images": []}, {}, "", ""),
        ("moonshotai/Kimi-K3", {"images": [CAT]}, {}, "row 2: .*rule by which images .* not known", "tokens_per_image"),
        ("google/gemma-3-4b-it", {"videos": [VIDEO]}, {}, "row 2: .*how many tokens a video has", "tokens_per_video"),
        (MODEL, {"images": [[9000, 10]]}, {}, "row 2: .*an image of 9000 x 10 is too narrow", ""),
        (MODEL, {}, {"images": {"max_pixels": 99}}, "gives no width and height, and .* has no images or videos", ""),
        (MODEL, {"images": [CAT]}, {"images": {"count": 2}}, "either width and height, or sizes; without them", ""),
        (MODEL, {"images": [CAT]}, {"videos": {"seconds": 2}}, "a video needs width and height; without them", ""),
        (
            MODEL,
            {"images": [CAT]},
            {"images": {"width": 5, "height": 5}, "videos": {"fps": 1}},
            "one has a size and the other has none",
            "",
        ),
    ],
)
def test_what_a_model_cannot_see_is_refused(
    tmp_path: Path, model: str, media: dict[str, Any], load: dict[str, Any], message: str, hint: str
) -> None:
    path = write(tmp_path / "trace.jsonl", {}, media)
    if not message:
        assert requests_of(path, model, **load).media is None
        return
    with pytest.raises(InputError, match=message) as error:
        requests_of(path, model, **load)
    assert hint in (error.value.hint or "")


def test_text_shared_by_hash_ids_does_not_stand_behind_images(tmp_path: Path) -> None:
    rows = [{"images": [CAT], "hash_ids": [1], "input_tokens": 868}]
    path = write(tmp_path / "trace.jsonl", *rows)
    with pytest.raises(InputError, match="images at their start would part them"):
        requests_of(path, images={"position": "start"})
    counted = requests_of(path, trace={"input_includes_media": True}, images={"position": "start"})
    assert counted.media is not None
    assert counted.media[0, 0, 2] == 0


def test_only_a_scenario_knows_the_model(tmp_path: Path) -> None:
    scenario = scenario_of(write(tmp_path / "trace.jsonl", {"images": [CAT]}))
    assert scenario.workload.vision is not None
    with pytest.raises(InputError, match="become tokens by the rule of a model"):
        generate(msgspec.structs.replace(scenario.workload, vision=None), 0)
    assert scenario_of(write(tmp_path / "text.jsonl", {})).workload.vision is None
    drawn = {"arrivals": {"type": "static", "rate_per_s": 1}, "input_tokens": 1, "output_tokens": 1, "num_requests": 1}
    described = {"model": MODEL, "deployment": {"device": "h100_sxm"}, "workload": {**drawn, "images": {}}}
    with pytest.raises(InputError, match="or a trace that has them"):
        scenario_from(described)
    with pytest.raises(InputError, match="change text alone"):
        scenario_of(tmp_path / "trace.jsonl", trace={"input_includes_media": True, "input_scale": 2})
