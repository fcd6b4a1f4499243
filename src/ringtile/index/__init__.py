"""The tiles that a pattern keeps, and the order in which kernels visit them."""

from ringtile.index.block_index import BlockIndex as BlockIndex
from ringtile.index.block_lists import from_block_mask as from_block_mask
from ringtile.index.block_lists import to_block_mask as to_block_mask
from ringtile.index.build import CacheInfo as CacheInfo
from ringtile.index.build import build_index as build_index
from ringtile.index.build import build_rows as build_rows
from ringtile.index.build import cache_info as cache_info
from ringtile.index.build import clear_cache as clear_cache
from ringtile.index.build import set_cache_limit as set_cache_limit
from ringtile.index.covers import candidates as candidates
from ringtile.index.covers import needed as needed
from ringtile.index.density import Solution as Solution
from ringtile.index.density import with_density as with_density
