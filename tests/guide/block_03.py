config = SparsePatternConfig(
    pattern_type='global_local',
    sparsity_ratio=0.2,
    global_tokens=64,  # Number of global attention tokens
    local_window_size=256
)
