"""Images and videos of requests, drawn or of a trace: which each brings, and where their tokens stand."""

from collections.abc import Sequence

import numpy as np

from windtunnel.compiled.arrays import Bools, Ints
from windtunnel.errors import InputError
from windtunnel.model.towers import Patches
from windtunnel.workload.generate.draws import Counts, child, draw_counts, draw_indices
from windtunnel.workload.media import Images, Videos, Vision, recorded_patches
from windtunnel.workload.schema import Workload
from windtunnel.workload.traces.media import NUMBER, ROW

MEDIA_KEY = 2000
"""Images and videos are drawn from the seed's child of this number."""


def draw_media(workload: Workload, num_requests: int, seed: np.random.SeedSequence) -> Counts:
    """Draw what each request brings itself, images before videos.

    Returns `[num_requests, most of a request, 2]`: kind, a position in `workload.media_tokens`, and number of the
    image, equal numbers being the same image; both are -1 behind the last.
    """
    rngs = [np.random.default_rng(child(child(seed, MEDIA_KEY), key)) for key in range(5)]
    medias = (workload.images, workload.videos)
    nothing = np.zeros(num_requests, np.int64)
    counts = [nothing if m is None else draw_counts(m.count, num_requests, rngs[i]) for i, m in enumerate(medias)]
    num_images, num_videos = (int(count.sum()) for count in counts)
    number, kind = np.arange(num_images), np.zeros(num_images, np.int64)
    num_sizes, num_distinct = 1, num_images
    if workload.images is not None:
        num_sizes = len(workload.images.every_size)
        number, kind, num_distinct = _images(workload.images, num_images, rngs[2:])
    columns = np.arange(int(sum(counts).max(initial=0)))  # type: ignore[union-attr]
    is_image = columns < counts[0][:, None]
    is_video = ~is_image & (columns < (counts[0] + counts[1])[:, None])
    media = np.full((num_requests, columns.size, 2), -1, np.int64)
    media[is_image] = np.stack([kind, number], axis=1)
    media[is_video, 0] = num_sizes
    media[is_video, 1] = num_distinct + np.arange(num_videos)
    return media


def _images(images: Images, size: int, rngs: list[np.random.Generator]) -> tuple[Counts, Counts, int]:
    """Draw `size` images: their numbers, their kinds, and how many there are to draw from."""
    weights = np.array([each.weight for each in images.every_size])
    if images.distinct is None:
        return np.arange(size), draw_indices(weights, size, rngs[0]), size
    popularity = np.arange(1, images.distinct + 1, dtype=np.float64) ** -images.alpha
    number = draw_indices(popularity, size, rngs[1])
    return number, draw_indices(weights, images.distinct, rngs[2])[number], images.distinct


def own_begins(media: Counts, tokens: Counts, images: Images | None, own_text: Counts) -> tuple[Counts, Counts]:
    """Return where the tokens of each image begin in a request's own part of the prompt, and the tokens of all.

    Args:
        media: of `draw_media`.
        tokens: of each kind.
        images: says whether images stand before the text.
        own_text: tokens of each request's text.
    """
    is_behind = np.ones(media.shape[:2], bool)
    if images is not None and images.position == "start":
        is_behind = media[..., 0] >= len(images.every_size)
    begins, sizes = placed(media[..., 0], tokens, is_behind, own_text)
    return begins, sizes.sum(axis=1)


def placed(kinds: Counts, tokens: Counts, is_behind: Bools, text: Counts) -> tuple[Counts, Counts]:
    """Return where the tokens of each image begin and how many they are, behind the text or before it."""
    sizes = np.where(kinds >= 0, tokens[kinds], 0)
    return np.cumsum(sizes, axis=1) - sizes + np.where(is_behind, text[:, None], 0), sizes


def recorded_kinds(
    recorded: Counts, vision: Vision, seen: tuple[Images | None, Videos | None], path: str
) -> tuple[Counts, list[Patches]]:
    """Return the kind of each image and video of a trace, -1 behind the last, and the patches of each kind.

    Images of equal patches and tokens are of one kind, whatever their pixels. InputError where the model's rule does
    not take a size; names the first row that has it.

    Args:
        recorded: `[num_requests, most of a request, 5]` as in `RowMedia.padded`.
        seen: how its processor sees images and videos.
    """
    has = recorded[..., ROW] >= 0
    sizes, first, of_item = np.unique(recorded[has][:, :NUMBER], axis=0, return_index=True, return_inverse=True)
    patches = list[Patches]()
    for size, item in zip(sizes.tolist(), first.tolist(), strict=True):
        try:
            patches += recorded_patches(vision, *seen, [(size[0], size[1], size[2])])
        except InputError as error:
            raise InputError(f"{path} row {recorded[has][item, ROW]}: {error.message}", error.hint) from None
    known = sorted(set(patches))
    place = {each: kind for kind, each in enumerate(known)}
    kind_of_size = np.array([place[each] for each in patches], np.int64)
    kinds = np.full(has.shape, -1, np.int64)
    kinds[has] = kind_of_size[of_item.ravel()]
    return kinds, known


def merged_media(parts: Sequence[Counts | None], sizes: Sequence[int]) -> Counts | None:
    """Join the recorded images and videos of several streams, one behind the other; None where none has any.

    Streams have no image in common.
    """
    known = [part for part in parts if part is not None]
    if not known:
        return None
    most, num_images = max(part.shape[1] for part in known), 0
    joined = np.full((sum(sizes), most, known[0].shape[2]), -1, np.int64)
    for part, end, size in zip(parts, np.cumsum(sizes), sizes, strict=True):
        if part is not None:
            rows = joined[end - size : end, : part.shape[1]]
            rows[:] = part
            rows[..., NUMBER] += np.where(part[..., NUMBER] >= 0, num_images, 0)
            num_images += int(part[..., NUMBER].max(initial=-1)) + 1
    return joined


def with_earlier(own: Counts, begin: Counts, previous: Counts, added: Counts) -> tuple[Counts, Counts]:
    """Return the media of all prompts, those of earlier turns first, and the tokens of those earlier ones.

    Args:
        own: `[requests, items, 3]` kind, number, and position in the request's own part of the prompt.
        begin: where that part begins, without the tokens of earlier images.
        previous: row of the turn before, further up, or -1.
        added: tokens of each request's own images and videos.
    """
    rows: list[Ints] = []
    earlier = np.zeros(len(own), np.int64)
    for i, before in enumerate(previous.tolist()):
        if before >= 0:
            earlier[i] = earlier[before] + added[before]
        row = own[i][own[i, :, 0] >= 0] + [0, 0, begin[i] + earlier[i]]
        rows.append(row if before < 0 else np.concatenate([rows[before], row]))
    placed = np.full((len(rows), max((len(row) for row in rows), default=0), 3), -1, np.int64)
    for i, row in enumerate(rows):
        placed[i, : len(row)] = row
    return placed, earlier


def image_nodes(media: Counts, tokens: Counts, parent: Counts, num_nodes: int) -> tuple[Counts, Counts, Counts]:
    """Return a forest's nodes for images at the beginning of prompts: requests share those that follow the same ones.

    Args:
        media: of `draw_media`, images alone.
        tokens: of each kind.
        parent: node that each request's images follow, or -1.
        num_nodes: nodes of the forest so far.

    Returns:
        Parents and tokens of the new nodes, and the last node of each request.
    """
    known: dict[tuple[int, int], int] = {}
    parents, sizes, last = [], [], parent.copy()
    for i, items in enumerate(media.tolist()):
        for kind, number in items:
            if kind < 0:
                break
            key = (int(last[i]), number)
            if key not in known:
                known[key] = num_nodes + len(known)
                parents.append(key[0])
                sizes.append(int(tokens[kind]))
            last[i] = known[key]
    return np.array(parents, np.int64), np.array(sizes, np.int64), last
