"""Exact sparse attention for long sequences in PyTorch: block-sparse, sliding-window, dilated and packed."""

import sys as _sys
import warnings as _warnings
from pathlib import Path as _Path

# Of the `ringtile` command, which needs no numpy: torch warns when it is imported. Your own programs see the warning.
if _Path(_sys.argv[0]).stem == "ringtile" or (_sys.argv[0] == "-m" and "ringtile" in _sys.orig_argv):
    _warnings.filterwarnings("ignore", "Failed to initialize NumPy", UserWarning)

from ringtile.functional import (
    ByKey as ByKey,
    ByQuery as ByQuery,
    Grid as Grid,
    Relative as Relative,
    dilated_attention as dilated_attention,
    from_score_mod as from_score_mod,
    in_slices as in_slices,
    merge_attention as merge_attention,
    sparse_attention as sparse_attention,
)
from ringtile.index import BlockIndex as BlockIndex, build_index as build_index
from ringtile.modules import (
    SparseLanguageModel as SparseLanguageModel,
    SparseMultiheadAttention as SparseMultiheadAttention,
    SparseTransformer as SparseTransformer,
    SparseTransformerLayer as SparseTransformerLayer,
    longnet_attend as longnet_attend,
    replace_attention as replace_attention,
)
from ringtile.patterns import Pattern as Pattern, per_head as per_head

__version__ = "0.1.0"
