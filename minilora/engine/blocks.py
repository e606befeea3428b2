"""`BlockPool`: which KV blocks are free."""

from __future__ import annotations


class BlockPool:
    """The free KV blocks, ``1..num_blocks``; block 0 is for padding rows.

    Args:
        num_blocks: blocks that requests can own.
        block_size: tokens in a block.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self._free = list(range(num_blocks, 0, -1))

    @property
    def num_free(self) -> int:
        """Blocks that nobody owns."""
        return len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def extend(self, block_ids: list[int], num_tokens: int) -> bool:
        """Let `block_ids` grow to hold `num_tokens`; False, and no change, if too few are free."""
        missing = self.blocks_for(num_tokens) - len(block_ids)
        if missing > len(self._free):
            return False
        block_ids.extend(self._free.pop() for _ in range(missing))
        return True

    def release(self, block_ids: list[int]) -> None:
        """Take all of `block_ids` back; the list is left empty."""
        self._free.extend(reversed(block_ids))
        block_ids.clear()
