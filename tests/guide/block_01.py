config = SparsePatternConfig(
    pattern_type='local_window',
    sparsity_ratio=0.1,  # 10% of blocks computed
    local_window_size=512  # Attention window in tokens
)
