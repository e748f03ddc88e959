"""Who holds which KV blocks, in plain Python: what is cached of a prompt, what a window has passed, what is free."""

from collections.abc import Sequence
from typing import Any

from oracles.serving.cache import TierPool
from oracles.serving.state import Rank, Request
from windtunnel.serving.codes import TRTLLM


class Memory:
    """Of all ranks."""

    settings: Any
    tiers: Sequence[Any]
    ranks: list[Rank]
    pools: list[list[TierPool]]
    """Of each tier."""

    # What a request needs

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // int(self.settings.block_size))

    def new_blocks(self, request: Request, num_tokens: int) -> tuple[int, int]:
        """Blocks that `request` needs beyond those that it holds to compute `num_tokens` more: of the pool, and of the
        windows' own.
        """
        if self.settings.scheduler == TRTLLM:
            blocks, window_blocks = self.whole_blocks(request)
        else:
            whole = self.blocks_for(request.computed_tokens + num_tokens)
            blocks = self.pool_blocks(whole, whole - request.passed) + int(self.settings.blocks_per_request)
            window_blocks = (whole - request.passed) * int(self.settings.window_pool)
        return blocks - request.num_blocks, window_blocks - request.num_window_blocks

    def fits(self, rank: Rank, request: Request, num_tokens: int, unused: int = 0) -> bool:
        needed, window_needed = self.new_blocks(request, num_tokens)
        return needed + unused <= rank.free_blocks and window_needed <= rank.free_window_blocks

    def fits_whole(self, rank: Rank, request: Request, unused: int) -> bool:
        """Whether all known tokens of waiting `request` fit: in groups with a window as many as they hold at once."""
        s = self.settings
        blocks = windows = self.blocks_for(request.known_tokens)
        if s.window_tokens:
            windows = min(blocks, self.blocks_for(s.window_tokens - 1 + s.max_num_batched_tokens) + 1)
        windows = max(windows - request.passed, 0)
        found = request.computed_tokens // int(s.block_size)
        needed = self.pool_blocks(blocks - found, windows) + int(s.blocks_per_request)
        return needed + unused <= rank.free_blocks and windows * int(s.window_pool) <= rank.free_window_blocks

    def fits_with_its_own(self, rank: Rank, request: Request, num_tokens: int) -> bool:
        """Whether there are blocks for it once it has given back what its window has passed."""
        passed = request.passed
        self.give_back(rank, request, self.will_pass(request, num_tokens))
        fits = self.fits(rank, request, num_tokens)
        self.give_back(rank, request, passed)
        return fits

    # Prefix cache

    def look_up(self, rank: Rank, request: Request, known_tokens: int | None = None, loads: bool = True) -> int:
        """Start waiting `request` from what is cached of its `known_tokens`, all without it, and where it `loads` from
        what lower tiers have; returns the blocks in the cache that nobody else uses.
        """
        rank.cache.shrink(rank.free_blocks // int(self.settings.num_groups))
        known_tokens = request.known_tokens if known_tokens is None else known_tokens
        most_blocks = (known_tokens - 1) // int(self.settings.block_size)
        request.num_used_segments, hit_blocks = rank.cache.find(request.segments, most_blocks)
        used = request.segments[: request.num_used_segments]
        unused = sum(rank.cache.blocks[s.index] for s in used if s.index in rank.cache.unused)
        whole = self.whole_blocks(request)[0]
        if not rank.running and unused > hit_blocks and whole + unused - hit_blocks > rank.free_blocks:
            request.num_used_segments = unused = 0
            hit_blocks, most_blocks = 0, 0
        request.shared_blocks = found = hit_blocks
        request.load_s = 0.0
        for tier, pool in zip(self.tiers, self.pools_of(rank), strict=True) if loads else ():
            below = pool.find(request.segments, most_blocks)
            request.load_s += max(below - found, 0) * float(tier.block_s)
            found = max(found, below)
        request.loading_blocks = found - hit_blocks
        request.num_blocks = found
        request.computed_tokens = found * int(self.settings.block_size)
        request.passed = self.passed_at(request.computed_tokens)
        return unused + found - hit_blocks

    def use_found(self, rank: Rank, request: Request) -> None:
        """`request` takes what `look_up` found of it."""
        rank.free_blocks -= sum(rank.cache.use(s) for s in request.segments[: request.num_used_segments])

    def pools_of(self, rank: Rank) -> list[TierPool]:
        """Of each tier the one that keeps blocks for `rank`."""
        number = next(number for number, other in enumerate(self.ranks) if other is rank)
        return [pools[number // int(tier.ranks_per_pool)] for tier, pools in zip(self.tiers, self.pools, strict=True)]

    def share(self, rank: Rank, request: Request, computed_tokens: int) -> None:
        """Cache the full blocks that `request` has computed; where they are cached already, give up its own."""
        rank.cache.shrink(rank.free_blocks // int(self.settings.num_groups))
        whole = computed_tokens // int(self.settings.block_size)
        for position, segment in enumerate(request.segments):
            mine = min(whole, segment.end_block) - segment.first_block
            found = rank.cache.blocks.get(segment.index, 0)
            behind = segment.index in rank.cache.unused and found > mine
            if mine <= 0 or (position >= request.num_used_segments and behind):
                break
            if segment.first_block + mine <= request.shared_blocks:
                continue
            if position >= request.num_used_segments:
                rank.free_blocks -= rank.cache.use(segment)
                request.num_used_segments += 1
            rank.cache.blocks[segment.index] = max(found, mine)
            gained = segment.first_block + mine - request.shared_blocks
            request.shared_blocks += gained
            rank.free_blocks += gained - max(mine - found, 0)

    def release(self, rank: Rank, request: Request, computed_tokens: int) -> None:
        """`request` stops running; what it computed stays in the cache, and in the tiers below."""
        self.share(rank, request, computed_tokens)
        for pool in self.pools_of(rank):
            pool.write(request.segments, computed_tokens // int(self.settings.block_size))
        rank.free_blocks += request.num_blocks - request.shared_blocks
        rank.free_blocks += rank.cache.leave(request.segments[: request.num_used_segments])
        rank.free_window_blocks += request.num_window_blocks
        request.num_blocks = request.shared_blocks = request.num_used_segments = 0
        request.num_window_blocks = request.passed = 0
        request.slides = False

    # Sliding windows

    def pool_blocks(self, num_blocks: int, num_window_blocks: int) -> int:
        """Blocks of the pool: one of each group of layers for a block of tokens, fewer in those with a window."""
        s = self.settings
        return int((s.num_groups - s.num_window_groups) * num_blocks + s.num_window_groups * num_window_blocks)

    def passed_at(self, num_tokens: int) -> int:
        """Whole blocks of tokens that the token after `num_tokens` is a window or more away from."""
        s = self.settings
        if s.window_tokens == 0 or s.scheduler == TRTLLM:
            return 0
        return max(num_tokens - int(s.window_tokens) + 1, 0) // int(s.block_size)

    def whole_blocks(self, request: Request) -> tuple[int, int]:
        """What `request` takes at most of the pool, and of the windows' own."""
        s = self.settings
        blocks = windows = self.blocks_for(request.input_tokens + request.output_tokens)
        if s.window_tokens:
            windows = min(blocks, self.blocks_for(s.window_tokens - 1 + s.max_num_batched_tokens) + 1)
        return self.pool_blocks(blocks, windows) + int(s.blocks_per_request), int(s.window_pool) * windows

    def will_pass(self, request: Request, num_tokens: int) -> int:
        """`Request.passed` when its next `num_tokens` are scheduled."""
        if not request.is_decoding:
            return self.passed_at(request.computed_tokens)
        return self.passed_at(request.computed_tokens + num_tokens - 1) if request.slides else request.passed

    def give_back(self, rank: Rank, request: Request, passed: int) -> None:
        """Blocks before `passed` leave the groups with a window."""
        num_blocks = passed - request.passed
        rank.free_blocks += num_blocks * int(self.settings.num_window_groups)
        request.num_blocks -= num_blocks * int(self.settings.num_window_groups)
        rank.free_window_blocks += num_blocks * int(self.settings.window_pool)
        request.num_window_blocks -= num_blocks * int(self.settings.window_pool)
        request.passed = passed

    def see_whether_it_slides(self, rank: Rank, request: Request) -> None:
        """`request` decodes: once its window is full, it gives blocks back while it goes on."""
        s = self.settings
        if request.computed_tokens >= s.window_tokens > 0 and not request.slides and s.scheduler != TRTLLM:
            request.slides = True
            self.give_back(rank, request, self.passed_at(request.computed_tokens - 1))
