"""Attention over the kept pairs of a pattern: the layer that every caller uses."""

from ringtile.functional.attention import sparse_attention as sparse_attention
from ringtile.functional.dilated import dilated_attention as dilated_attention
from ringtile.functional.merge import merge_attention as merge_attention
from ringtile.functional.slices import in_slices as in_slices
