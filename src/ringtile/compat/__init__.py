"""The public names of the system that ringtile succeeds, as thin translations: tensors are ``[B, N, H, D]``."""

from ringtile.compat.attention import BlockSparseOptimized as BlockSparseOptimized
from ringtile.compat.attention import BlockSparseRingDilatedAttention as BlockSparseRingDilatedAttention
from ringtile.compat.attention import BlockSparseTorchSparse as BlockSparseTorchSparse
from ringtile.compat.attention import ImprovedDilatedAttention as ImprovedDilatedAttention
from ringtile.compat.attention import RingAttentionConfig as RingAttentionConfig
from ringtile.compat.attention import RingDilatedAttentionProduction as RingDilatedAttentionProduction
from ringtile.compat.attention import RingDilatedAttentionV2 as RingDilatedAttentionV2
from ringtile.compat.attention import hierarchical_sparse_attention as hierarchical_sparse_attention
from ringtile.compat.config import PatternConfig as PatternConfig
from ringtile.compat.config import SparsePatternConfig as SparsePatternConfig
from ringtile.compat.distributed import (
    BlockSparseRingAdvancedDistributedDilatedAttention as BlockSparseRingAdvancedDistributedDilatedAttention,
)
from ringtile.compat.distributed import DistributedSparseConfig as DistributedSparseConfig
from ringtile.compat.distributed import DistributedSparsePattern as DistributedSparsePattern
from ringtile.compat.distributed import GradientCompression as GradientCompression
from ringtile.compat.distributed import compress_gradients as compress_gradients
from ringtile.compat.generator import PersistentPatternCache as PersistentPatternCache
from ringtile.compat.generator import SparsePatternGenerator as SparsePatternGenerator
from ringtile.compat.multihead import (
    BlockSparseRingMultiheadDilatedAttention as BlockSparseRingMultiheadDilatedAttention,
)
from ringtile.compat.multihead import ImprovedMultiheadDilatedAttention as ImprovedMultiheadDilatedAttention
from ringtile.compat.multihead import (
    create_adaptive_sparse_multihead_attention as create_adaptive_sparse_multihead_attention,
)
from ringtile.compat.multihead import create_block_sparse_multihead_attention as create_block_sparse_multihead_attention
from ringtile.compat.pattern_tools import PatternMetrics as PatternMetrics
from ringtile.compat.pattern_tools import PatternQualityAnalyzer as PatternQualityAnalyzer
from ringtile.compat.pattern_tools import PatternVisualizer as PatternVisualizer
from ringtile.compat.pattern_tools import pattern_statistics as pattern_statistics
