"""Exact sparse attention for long sequences in PyTorch: block-sparse, sliding-window, dilated and packed."""

import sys as _sys
import warnings as _warnings
from pathlib import Path as _Path

# Of the `ringtile` command, which needs no numpy: torch warns when it is imported. Your own programs see the warning.
if _Path(_sys.argv[0]).stem == "ringtile" or (_sys.argv[0] == "-m" and "ringtile" in _sys.orig_argv):
    _warnings.filterwarnings("ignore", "Failed to initialize NumPy", UserWarning)

from ringtile.functional import ByKey as ByKey
from ringtile.functional import ByQuery as ByQuery
from ringtile.functional import Grid as Grid
from ringtile.functional import Relative as Relative
from ringtile.functional import dilated_attention as dilated_attention
from ringtile.functional import in_slices as in_slices
from ringtile.functional import merge_attention as merge_attention
from ringtile.functional import sparse_attention as sparse_attention
from ringtile.index import BlockIndex as BlockIndex
from ringtile.index import build_index as build_index
from ringtile.modules import SparseLanguageModel as SparseLanguageModel
from ringtile.modules import SparseMultiheadAttention as SparseMultiheadAttention
from ringtile.modules import SparseTransformer as SparseTransformer
from ringtile.modules import SparseTransformerLayer as SparseTransformerLayer
from ringtile.modules import longnet_attend as longnet_attend
from ringtile.modules import replace_attention as replace_attention
from ringtile.patterns import Pattern as Pattern
from ringtile.patterns import per_head as per_head

__version__ = "0.1.0"
