# Automatic pattern learning
attention = BlockSparseRingDilatedAttention(
    segment_lengths=[2048, 4096],
    dilation_rates=[1, 2],
    use_adaptive_sparsity=True
)
