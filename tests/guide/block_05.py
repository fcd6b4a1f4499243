from dilated_attention_pytorch import BlockSparseRingDilatedAttention, SparsePatternConfig

config = SparsePatternConfig(
    pattern_type='dilated_sparse',
    sparsity_ratio=0.1,  # 90% sparse, 10x speedup
    block_size=128
)

attention = BlockSparseRingDilatedAttention(
    segment_lengths=[2048, 4096, 8192],
    dilation_rates=[1, 2, 4],
    sparse_config=config,
    use_adaptive_sparsity=False,
    ring_size=1  # Single GPU
)

# Use like standard attention
output = attention(query, key, value, is_causal=True)
