"""Draws of images and videos: which images each request brings, of which sizes, and where their tokens stand."""

import numpy as np
from numpy.typing import NDArray

from windtunnel.workload.generate.draws import Counts, child, draw_counts, draw_indices
from windtunnel.workload.media import Images
from windtunnel.workload.schema import Workload

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
    sizes = np.where(media[..., 0] >= 0, tokens[media[..., 0]], 0)
    begins = np.cumsum(sizes, axis=1) - sizes
    is_behind = np.ones(begins.shape, bool)
    if images is not None and images.position == "start":
        is_behind = media[..., 0] >= len(images.every_size)
    return begins + np.where(is_behind, own_text[:, None], 0), sizes.sum(axis=1)


def with_earlier(own: Counts, begin: Counts, previous: Counts, added: Counts) -> tuple[Counts, Counts]:
    """Return the media of all prompts, those of earlier turns first, and the tokens of those earlier ones.

    Args:
        own: `[requests, items, 3]` kind, number, and position in the request's own part of the prompt.
        begin: where that part begins, without the tokens of earlier images.
        previous: row of the turn before, further up, or -1.
        added: tokens of each request's own images and videos.
    """
    rows: list[NDArray[np.int64]] = []
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
