"""Exact sparse attention over long sequences: block-sparse, dilated and ring, forward and backward."""

from ringtile.functional import merge_attention as merge_attention
from ringtile.functional import sparse_attention as sparse_attention
from ringtile.layout import BlockIndex as BlockIndex
from ringtile.layout import build_index as build_index
from ringtile.patterns import Pattern as Pattern
from ringtile.patterns import per_head as per_head

__version__ = "0.1.0"
