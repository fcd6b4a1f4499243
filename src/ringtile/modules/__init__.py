"""Modules with parameters. Each has an argument ``attend=``, the function that computes attention."""

from ringtile.functional.cache import LayerCache as LayerCache
from ringtile.modules.language_model import SparseLanguageModel as SparseLanguageModel
from ringtile.modules.longnet import longnet_attend as longnet_attend
from ringtile.modules.multihead import (
    SparseMultiheadAttention as SparseMultiheadAttention,
    replace_attention as replace_attention,
)
from ringtile.modules.transformer import (
    KVCache as KVCache,
    SparseTransformer as SparseTransformer,
    SparseTransformerLayer as SparseTransformerLayer,
)
