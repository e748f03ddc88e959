"""The prefix cache of one rank in plain Python, and the tiers below it: the oracle of the compiled ones.

A prompt is a chain of segments, root first; of each the cache knows how many blocks it has, from the front, and how
many running requests use it. What nobody uses is kept in the order of release and shortened from its end.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Segment:
    """The full blocks of a prompt, or of a prompt and its output, that end in one segment; at least one."""

    index: int
    first_block: int
    end_block: int
    is_own: bool = False
    """No other prompt has it."""


@dataclass
class RankCache:
    """Segments by index."""

    blocks: dict[int, int] = field(default_factory=dict)
    users: dict[int, int] = field(default_factory=dict)
    unused: dict[int, None] = field(default_factory=dict)
    """The oldest first."""

    @property
    def num_unused_blocks(self) -> int:
        return sum(self.blocks[index] for index in self.unused)

    @property
    def num_repeated_blocks(self) -> int:
        """Blocks in use, once for every request that uses one beside the first."""
        return sum((users - 1) * self.blocks.get(index, 0) for index, users in self.users.items() if users > 1)

    def shrink(self, room: int) -> None:
        """Drop the oldest unused blocks until no more are left than there is room for."""
        while self.num_unused_blocks > room:
            oldest = next(iter(self.unused))
            self.blocks[oldest] -= 1
            if self.blocks[oldest] == 0:
                del self.unused[oldest]

    def find(self, chain: Sequence[Segment], most_blocks: int) -> tuple[int, int]:
        """How many segments of `chain` are there, the last one perhaps in part, and how many blocks of use those have;
        a segment that begins after `most_blocks` is of no use.
        """
        num_segments, num_blocks = 0, 0
        for segment in chain:
            found = self.blocks.get(segment.index, 0)
            if found == 0 or num_blocks < segment.first_block or segment.first_block >= most_blocks:
                break
            num_segments, num_blocks = num_segments + 1, segment.first_block + found
        return num_segments, min(num_blocks, most_blocks)

    def forget(self, segment: Segment) -> None:
        """Drop what nobody uses of `segment`."""
        if segment.index in self.unused:
            del self.unused[segment.index], self.blocks[segment.index]

    def use(self, segment: Segment) -> int:
        """Returns the blocks that were unused and are not any more."""
        self.users[segment.index] = self.users.get(segment.index, 0) + 1
        if segment.index not in self.unused:
            return 0
        del self.unused[segment.index]
        return self.blocks[segment.index]

    def leave(self, chain: Sequence[Segment]) -> int:
        """Nobody but others uses `chain` any more; returns the blocks that nobody uses now."""
        num_blocks = 0
        for segment in reversed(chain):
            self.users[segment.index] -= 1
            if self.users[segment.index] == 0:
                self.unused[segment.index] = None
                num_blocks += self.blocks[segment.index]
        return num_blocks


@dataclass
class TierPool:
    """Segments that a tier of memory below the device's keeps for some ranks."""

    capacity_blocks: int
    blocks: dict[int, int] = field(default_factory=dict)
    """By segment, the least recently written first."""

    def write(self, chain: Sequence[Segment], num_blocks: int) -> None:
        """Keep the first `num_blocks` of `chain`."""
        for segment in reversed(chain):
            if segment.first_block < num_blocks:
                had = self.blocks.pop(segment.index, 0)
                self.blocks[segment.index] = max(had, min(num_blocks, segment.end_block) - segment.first_block)
        while sum(self.blocks.values()) > self.capacity_blocks:
            oldest = next(iter(self.blocks))
            self.blocks[oldest] -= 1
            if self.blocks[oldest] == 0:
                del self.blocks[oldest]

    def find(self, chain: Sequence[Segment], most_blocks: int) -> int:
        """Leading blocks of `chain` that are there, at most `most_blocks`."""
        num_blocks = 0
        for segment in chain:
            if segment.index not in self.blocks or num_blocks < segment.first_block:
                break
            num_blocks = segment.first_block + self.blocks[segment.index]
        return min(num_blocks, most_blocks)
