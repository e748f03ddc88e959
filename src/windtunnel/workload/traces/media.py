"""Images and videos in a request trace: lists of sizes, or columns of a number, a width and a height.

{"input_tokens": 90, "output_tokens": 20, "images": [[1024, 768], {"width": 512, "height": 512, "id": "cat"}]}
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from windtunnel.compiled.arrays import Ints
from windtunnel.errors import InputError
from windtunnel.units import format_count
from windtunnel.workload.media import FPS, MAX_FRAMES, MAX_SIDE, frames_of
from windtunnel.workload.traces.columns import shown
from windtunnel.workload.traces.table_file import Batch, text_of, values_of

FRAMES, _WIDTH, _HEIGHT, NUMBER, ROW = range(5)
"""Columns of `RowMedia.items`."""
SHAPES = {
    "images": 'write [width, height] for each, [width, height, id], or {"width": 1024, "height": 768, "id": "cat"}',
    "videos": 'write {"width": 640, "height": 360, "frames": 32, "id": "dog"} for each; or seconds for frames',
}
KEYS = {"images": {"width", "height", "id"}, "videos": {"width", "height", "id", "frames", "seconds", "fps"}}
SIDES = ("width", "height")
MOST_OF_REQUEST = 1000
"""Images and videos of one request that are read at most."""


@dataclass(frozen=True, slots=True, eq=False)
class RowMedia:
    """Images and videos of requests: row i has items[offsets[i] : offsets[i + 1]], images first."""

    offsets: Ints
    items: Ints
    """`[n, 5]` Frames (0: an image), width, height, number (equal: the same one; -1: one that comes once), row in the
    file."""

    def take(self, rows: Ints | slice) -> "RowMedia":
        sizes = np.diff(self.offsets)[rows]
        offsets = np.concatenate([[0], np.cumsum(sizes)])
        begin = np.repeat(self.offsets[:-1][rows] - offsets[:-1], sizes)
        return replace(self, offsets=offsets, items=self.items[begin + np.arange(offsets[-1])])

    def padded(self) -> Ints:
        """Return `[num_requests, most of a request, 5]`, -1 behind the last, a number of its own for every item."""
        counts, items = np.diff(self.offsets), self.items.copy()
        single = items[:, NUMBER] < 0
        items[single, NUMBER] = items[:, NUMBER].max(initial=-1) + 1 + np.arange(int(single.sum()))
        padded = np.full((counts.size, int(counts.max(initial=0)), items.shape[1]), -1, np.int64)
        padded[np.arange(padded.shape[1]) < counts[:, None]] = items
        return padded


def described(media: Ints) -> str:
    """Say how many requests have images or videos, how many sizes these have, and how many come again.

    `media` is that of `RowMedia.padded`.
    """
    items, parts = media[media[..., ROW] >= 0], list[str]()
    for name, of_kind in (("image", items[items[:, FRAMES] == 0]), ("video", items[items[:, FRAMES] > 0])):
        if len(of_kind):
            num_sizes = len(np.unique(of_kind[:, :NUMBER], axis=0))
            parts.append(f"{format_count(len(of_kind), name)} of {format_count(num_sizes, 'size')}")
    num_again = len(items) - np.unique(items[:, NUMBER]).size
    again = f"; {num_again:,} are repeats" if num_again else ""
    num_requests = int((media[..., ROW] >= 0).any(axis=1).sum())
    has = "has" if num_requests == 1 else "have"
    return f"{num_requests:,} of {len(media):,} requests {has} {' and '.join(parts)}{again}"


def joined(parts: Sequence[RowMedia]) -> RowMedia | None:
    """Return the parts of a file as one; None where no request has any."""
    offsets = np.concatenate([[0], np.cumsum(np.concatenate([np.diff(part.offsets) for part in parts]))]).astype(
        np.int64
    )
    items = np.concatenate([part.items for part in parts])
    return RowMedia(offsets, items) if len(items) else None


@dataclass(slots=True)
class MediaReading:
    """The images and videos of a file, as far as they have been read."""

    path: Path
    names: Mapping[str, str]
    """Column of each of `MEDIA` that is read."""
    known: frozenset[str]
    """Columns that the first rows have."""
    numbers: dict[tuple[str, str], tuple[int, list[int], int]] = field(default_factory=dict)
    """(images or videos, id) -> its number, its frames and sides, and the first row that has it."""

    def read(self, batch: Batch, rows: Ints) -> RowMedia:
        """Read a block's rows, numbered `rows` in the file; InputError names a row of a wrong shape or out of range."""
        columns = {key: values_of(batch[name]) for key, name in self.names.items()}
        if all(value is None for column in columns.values() for value in column):
            return RowMedia(np.zeros(rows.size + 1, np.int64), np.zeros((0, 5), np.int64))
        offsets, items = [0], list[list[int]]()
        for index, row in enumerate(rows.tolist()):
            values = {
                key: None if text_of(column[index]).strip() == "" else column[index] for key, column in columns.items()
            }
            listed = [(what, item) for what in SHAPES for item in self._list(what, values.get(what), row)]
            listed += self._equal(values, bool(listed), row)
            if len(listed) > MOST_OF_REQUEST:
                raise InputError(
                    f"{self.path} row {row} has {len(listed):,} images and videos, above {MOST_OF_REQUEST:,}"
                )
            items += [self._item(what, item, row) for what, item in listed]
            offsets.append(len(items))
        return RowMedia(np.array(offsets, np.int64), np.array(items, np.int64).reshape(-1, 5))

    def _list(self, what: str, value: Any, row: int) -> Sequence[Any]:
        """Return the items of a row, which are JSON where they are text."""
        items = () if value is None else value
        if isinstance(value, str):
            try:
                items = msgspec.json.decode(value)
            except msgspec.DecodeError:
                raise self._wrong(what, row, value) from None
        if not isinstance(items, list | tuple):
            raise self._wrong(what, row, value)
        if items and self.names[what] not in self.known:
            raise InputError(
                f"{self.path} row {row} has {self.names[what]}, which none of the first rows has",
                f'give the first row an empty list: "{self.names[what]}": []',
            )
        return items

    def _equal(self, values: Mapping[str, Any], is_listed: bool, row: int) -> list[tuple[str, Any]]:
        """Return the images of a row that are a number, a width and a height in columns of their own."""
        given = values.get("num_images")
        if "num_images" not in self.names and any(values.get(key) for key in ("image_width", "image_height")):
            given = 1  # a size alone is one image
        count = 0 if given is None else self._whole(self.names.get("num_images", ""), given, row, (0, MOST_OF_REQUEST))
        if not count:
            return []
        name = f"{self.path} row {row}: {self.names.get('num_images', 'num_images')}"
        if is_listed:
            raise InputError(f"{name} is given beside images or videos", "give one of them")
        if missing := [key for key in ("image_width", "image_height") if values.get(key) is None]:
            raise InputError(
                f"{name} is {count}, and {missing[0]} is missing",
                "name it: workload.trace.columns: {image_width: NAME, image_height: NAME}, or give workload.images",
            )
        if count > 1 and values.get("image_id") is not None:
            raise InputError(f"{name} is {count} beside an id of one image", "list them in a column images")
        size = [values["image_width"], values["image_height"], values.get("image_id")]
        return [("images", size)] * count

    def _item(self, what: str, value: Any, row: int) -> list[int]:
        """Return the row of `RowMedia.items` of an image or a video."""
        if what == "images" and isinstance(value, list | tuple) and len(value) in (2, 3):
            value = dict(zip(("width", "height", "id"), value, strict=False))
        if not isinstance(value, Mapping) or not {"width", "height"} <= set(value):
            raise self._wrong(what, row, value)
        given = {key: each for key, each in value.items() if each is not None}
        if unknown := sorted(set(given) - KEYS[what]):
            raise InputError(f"{self.path} row {row}: {what} has an unknown key {unknown[0]!r}", SHAPES[what])
        size = [self._whole(f"{key} in {what}", value[key], row, (1, MAX_SIDE), SHAPES[what]) for key in SIDES]
        size.insert(0, self._frames(given, row) if what == "videos" else 0)
        return [*size, self._number(what, given.get("id"), size, row), row]

    def _frames(self, given: Mapping[str, Any], row: int) -> int:
        if ("frames" in given) == ("seconds" in given):
            raise InputError(f"{self.path} row {row}: a video needs either frames or seconds", SHAPES["videos"])
        frames = given.get("frames")
        if frames is None:
            times = {"seconds": given["seconds"], "fps": given.get("fps", FPS)}
            for key, value in times.items():
                if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < MAX_FRAMES:
                    raise InputError(f"{self.path} row {row}: {key} in videos is not positive: {shown(value)}")
            frames = frames_of(**times)
        return self._whole("frames in videos", frames, row, (1, MAX_FRAMES), SHAPES["videos"])

    def _whole(self, what: str, value: Any, row: int, limits: tuple[int, int], hint: str | None = None) -> int:
        is_whole = isinstance(value, int | float) and not isinstance(value, bool) and value == value // 1
        if not is_whole or not limits[0] <= value <= limits[1]:
            wanted = f"is not a whole number from {limits[0]} to {limits[1]:,}"
            raise InputError(f"{self.path} row {row}: {what} {wanted}: {shown(value)}", hint)
        return int(value)

    def _number(self, what: str, name: Any, size: list[int], row: int) -> int:
        """Return the number of the image or video of an id; -1 without one."""
        if isinstance(name, list | dict | bool):
            raise InputError(f"{self.path} row {row}: id in {what} is not text or a number: {shown(name)}")
        if not (text := text_of(name)):
            return -1
        number, known, first = self.numbers.setdefault((what, text), (len(self.numbers), size, row))
        if known != size:
            sides = [" x ".join(map(str, each if each[0] else each[1:])) for each in (size, known)]
            raise InputError(
                f"{self.path} row {row}: {shown(text)} in {what} has {sides[0]} pixels, and in row {first} {sides[1]}",
                "give every image an id of its own, or none",
            )
        return number

    def _wrong(self, what: str, row: int, value: Any) -> InputError:
        problem = f"{self.path} row {row}: {self.names[what]} has no list of sizes: {shown(value)}"
        return InputError(problem, f"{SHAPES[what]}; workload.{what} in their place says the same of all requests")
