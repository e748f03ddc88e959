"""Encoder caches in plain Python: vLLM's, after `EncoderCacheManager` and `Scheduler._try_schedule_encoder_inputs`, and
SGLang's, after `MultiModalStaticCache`.
"""

from collections import OrderedDict
from typing import Any, NamedTuple


class Item(NamedTuple):
    """An image or video of a prompt."""

    kind: int
    number: int
    begin: int
    """Position of its first token in the prompt."""
    tokens: int


class EncoderCache:
    """Embeddings of one rank."""

    def __init__(self, cache_tokens: int, budget_tokens: int) -> None:
        self.budget_tokens = self.left_tokens = budget_tokens
        self.free_tokens = self.freeable_tokens = cache_tokens
        self.users: dict[int, set[int]] = {}
        """Number of a cached image -> requests that need it."""
        self.freeable: OrderedDict[int, int] = OrderedDict()
        """Cached images that none needs -> tokens, the oldest first."""
        self.encoded: list[int] = []
        """Kinds of the images of the batch that is being formed."""

    def needed(self, request: Any, num_tokens: int) -> list[Item]:
        begin, end = request.computed_tokens, request.computed_tokens + num_tokens
        return [item for item in request.media if item.begin < end and item.begin + item.tokens > begin]

    def try_schedule(self, request: Any, num_tokens: int) -> tuple[int, list[Item]]:
        """Return the tokens that may be scheduled, and the images to encode for them."""
        to_encode: list[Item] = []
        for item in self.needed(request, num_tokens):
            if item.number in [other.number for other in to_encode]:
                continue
            if item.number in self.users:
                if not self.users[item.number]:
                    self.freeable_tokens -= self.freeable.pop(item.number)
                self.users[item.number].add(request.index)
                continue
            scheduled = sum(other.tokens for other in to_encode)
            if not self.can_allocate(item.tokens, scheduled):
                return max(item.begin - request.computed_tokens, 0), to_encode
            to_encode.append(item)
        return num_tokens, to_encode

    def can_allocate(self, tokens: int, scheduled: int) -> bool:
        if tokens > self.left_tokens - scheduled or tokens + scheduled > self.freeable_tokens:
            return False
        while tokens + scheduled > self.free_tokens:
            number, given_back = self.freeable.popitem(last=False)
            del self.users[number]
            self.free_tokens += given_back
        return True

    def allocate(self, request: Any, to_encode: list[Item]) -> None:
        for item in to_encode:
            self.users[item.number] = {request.index}
            self.free_tokens -= item.tokens
            self.freeable_tokens -= item.tokens
            self.left_tokens -= item.tokens
            self.encoded.append(item.kind)

    def release(self, request: Any, computed_tokens: int) -> None:
        """Of what lies in so many tokens of the prompt."""
        for item in request.media:
            if item.begin + item.tokens > computed_tokens or request.index not in self.users.get(item.number, ()):
                continue
            self.users[item.number].remove(request.index)
            if not self.users[item.number]:
                self.freeable[item.number] = item.tokens
                self.freeable_tokens += item.tokens


class EmbeddingCache:
    """SGLang's cache of one rank: embeddings of images, or of all images of a request, by their last use."""

    def __init__(self, num_tokens: int, by_request: bool) -> None:
        self.num_tokens, self.by_request = num_tokens, by_request
        self.kept: OrderedDict[Any, int] = OrderedDict()

    def get(self, key: Any) -> bool:
        if key in self.kept:
            self.kept.move_to_end(key)
        return key in self.kept

    def set(self, key: Any, tokens: int) -> None:
        while self.kept and sum(self.kept.values()) + tokens > self.num_tokens:
            self.kept.popitem(last=False)
        if tokens <= self.num_tokens:
            self.kept[key] = tokens

    def encoded(self, chunks: list[tuple[Any, int, int]]) -> list[int]:
        """Return the kinds of the images that a step encodes for (request, begin, end) of its chunks."""
        kinds: list[int] = []
        if self.by_request:
            for request, begin, _ in chunks:
                key = tuple(item.number for item in request.media)
                if any(item.begin + item.tokens > begin for item in request.media) and not self.get(key):
                    kinds += [item.kind for item in request.media]
                    self.set(key, sum(item.tokens for item in request.media))
            return kinds
        missing: dict[int, Item] = {}
        for request, begin, end in chunks:
            for item in request.media:
                if item.begin < end and item.begin + item.tokens > begin and not self.get(item.number):
                    missing.setdefault(item.number, item)
        for number, item in missing.items():
            kinds.append(item.kind)
            self.set(number, item.tokens)
        return kinds
