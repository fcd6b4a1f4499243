"""Immutable patterns of the pairs to keep, combined with ``&``, ``|`` and ``~``."""

from ringtile.patterns.base import Cover, Dense, Pattern, TileGrid
from ringtile.patterns.blocks import Blocks, Elements, SampledBlocks
from ringtile.patterns.chosen import Chosen
from ringtile.patterns.documents import Documents
from ringtile.patterns.grammar import parse, per_document, per_head
from ringtile.patterns.local import Causal, GlobalTokens, Segments, Strided, Window
from ringtile.patterns.mask import from_mask
from ringtile.patterns.neighborhood import Neighborhood
from ringtile.patterns.offsets import BlockDilated, Dilated
from ringtile.patterns.presets import bigbird, hierarchical, longformer, longnet_union, streaming
from ringtile.patterns.random import RandomBlocks

__all__ = [
    "BlockDilated",
    "Blocks",
    "Causal",
    "Chosen",
    "Cover",
    "Dense",
    "Dilated",
    "Documents",
    "Elements",
    "GlobalTokens",
    "Neighborhood",
    "Pattern",
    "RandomBlocks",
    "SampledBlocks",
    "Segments",
    "Strided",
    "TileGrid",
    "Window",
    "bigbird",
    "from_mask",
    "hierarchical",
    "longformer",
    "longnet_union",
    "parse",
    "per_document",
    "per_head",
    "streaming",
]
