config = SparsePatternConfig(
    pattern_type='dilated_sparse',
    sparsity_ratio=0.25,
    dilation_rates=[1, 2, 4, 8, 16]
)
