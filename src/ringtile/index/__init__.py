"""The tiles that a pattern keeps, and the order in which kernels visit them."""

from ringtile.index.block_index import BlockIndex as BlockIndex
from ringtile.index.block_lists import from_block_mask as from_block_mask, to_block_mask as to_block_mask
from ringtile.index.build import (
    CacheInfo as CacheInfo,
    build_index as build_index,
    build_rows as build_rows,
    cache_info as cache_info,
    clear_cache as clear_cache,
    set_cache_limit as set_cache_limit,
)
from ringtile.index.covers import candidates as candidates, needed as needed
from ringtile.index.density import Solution as Solution, with_density as with_density
