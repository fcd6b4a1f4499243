"""Immutable patterns of the pairs to keep, combined with ``&``, ``|`` and ``~``."""

from ringtile.patterns.base import Cover as Cover
from ringtile.patterns.base import Dense as Dense
from ringtile.patterns.base import Pattern as Pattern
from ringtile.patterns.base import TileGrid as TileGrid
from ringtile.patterns.blocks import Blocks as Blocks
from ringtile.patterns.blocks import Elements as Elements
from ringtile.patterns.blocks import SampledBlocks as SampledBlocks
from ringtile.patterns.documents import Documents as Documents
from ringtile.patterns.grammar import parse as parse
from ringtile.patterns.local import Causal as Causal
from ringtile.patterns.local import GlobalTokens as GlobalTokens
from ringtile.patterns.local import Segments as Segments
from ringtile.patterns.local import Strided as Strided
from ringtile.patterns.local import Window as Window
from ringtile.patterns.mask import from_mask as from_mask
from ringtile.patterns.offsets import BlockDilated as BlockDilated
from ringtile.patterns.offsets import Dilated as Dilated
from ringtile.patterns.presets import bigbird as bigbird
from ringtile.patterns.presets import hierarchical as hierarchical
from ringtile.patterns.presets import longformer as longformer
from ringtile.patterns.presets import longnet_union as longnet_union
from ringtile.patterns.presets import streaming as streaming
from ringtile.patterns.random import RandomBlocks as RandomBlocks
from ringtile.patterns.wrapped import per_head as per_head
