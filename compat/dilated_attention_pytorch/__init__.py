"""The public names of the system that ringtile succeeds, translated to it: tensors are ``[B, N, H, D]``."""

from dilated_attention_pytorch.attention import (
    BlockSparseOptimized as BlockSparseOptimized,
    BlockSparseRingDilatedAttention as BlockSparseRingDilatedAttention,
    BlockSparseTorchSparse as BlockSparseTorchSparse,
    ImprovedDilatedAttention as ImprovedDilatedAttention,
    RingAttentionConfig as RingAttentionConfig,
    RingDilatedAttentionProduction as RingDilatedAttentionProduction,
    RingDilatedAttentionV2 as RingDilatedAttentionV2,
    hierarchical_sparse_attention as hierarchical_sparse_attention,
)
from dilated_attention_pytorch.config import (
    PatternConfig as PatternConfig,
    PatternType as PatternType,
    SparsePatternConfig as SparsePatternConfig,
)
from dilated_attention_pytorch.distributed import (
    BlockSparseRingAdvancedDistributedDilatedAttention as BlockSparseRingAdvancedDistributedDilatedAttention,
    DistributedSparseConfig as DistributedSparseConfig,
    DistributedSparsePattern as DistributedSparsePattern,
    GradientCompression as GradientCompression,
    compress_gradients as compress_gradients,
)
from dilated_attention_pytorch.generator import (
    PersistentPatternCache as PersistentPatternCache,
    SparsePatternGenerator as SparsePatternGenerator,
)
from dilated_attention_pytorch.multihead import (
    BlockSparseRingMultiheadDilatedAttention as BlockSparseRingMultiheadDilatedAttention,
    ImprovedMultiheadDilatedAttention as ImprovedMultiheadDilatedAttention,
    create_adaptive_sparse_multihead_attention as create_adaptive_sparse_multihead_attention,
    create_block_sparse_multihead_attention as create_block_sparse_multihead_attention,
)
from dilated_attention_pytorch.pattern_tools import (
    PatternMetrics as PatternMetrics,
    PatternQualityAnalyzer as PatternQualityAnalyzer,
    PatternVisualizer as PatternVisualizer,
    analyze_pattern_statistics as analyze_pattern_statistics,
    pattern_statistics as pattern_statistics,
)
