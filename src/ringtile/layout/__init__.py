"""The tiles that a pattern keeps, and the order in which kernels visit them."""

from ringtile.layout.build import CacheInfo as CacheInfo
from ringtile.layout.build import build_index as build_index
from ringtile.layout.build import build_rows as build_rows
from ringtile.layout.build import cache_info as cache_info
from ringtile.layout.build import clear_cache as clear_cache
from ringtile.layout.build import set_cache_limit as set_cache_limit
from ringtile.layout.covers import candidates as candidates
from ringtile.layout.covers import needed as needed
from ringtile.layout.density import Solution as Solution
from ringtile.layout.density import with_density as with_density
from ringtile.layout.flex import from_block_mask as from_block_mask
from ringtile.layout.flex import to_block_mask as to_block_mask
from ringtile.layout.index import BlockIndex as BlockIndex
