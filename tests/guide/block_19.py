# Solution: Reduce sparsity or use adaptive patterns
attention.set_sparsity_ratio(0.25)  # Less aggressive
# OR
attention.enable_adaptive_sparsity(True)
