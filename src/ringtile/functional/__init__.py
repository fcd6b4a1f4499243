"""Attention over the kept pairs of a pattern: the layer that every caller uses."""

from ringtile.functional.attention import sparse_attention as sparse_attention
from ringtile.functional.bias import ByKey as ByKey, ByQuery as ByQuery, Grid as Grid, Relative as Relative
from ringtile.functional.dilated import dilated_attention as dilated_attention
from ringtile.functional.merge import merge_attention as merge_attention
from ringtile.functional.score_mod import from_score_mod as from_score_mod
from ringtile.functional.slices import in_slices as in_slices
