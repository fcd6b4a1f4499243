# Production configuration
from dilated_attention_pytorch import BlockSparseRingMultiheadDilatedAttention

attention = BlockSparseRingMultiheadDilatedAttention(
    embed_dim=1024,
    num_heads=16,
    segment_lengths=[2048, 4096, 8192],  # Hierarchical segments
    dilation_rates=[1, 2, 4],
    sparse_config=SparsePatternConfig(
        pattern_type='dilated_sparse',
        sparsity_ratio=0.1,  # Start conservative
        block_size=128,  # Optimal for H100
        min_sparsity=0.05,  # Safety bounds
        max_sparsity=0.95
    ),
    dropout=0.1,
    use_layer_norm=True,  # Stability
    batch_first=True,  # PyTorch convention
    device='cuda',
    dtype=torch.float16  # Mixed precision
)
