from dilated_attention_pytorch.sparse_pattern_utils import (
    SparsePatternGenerator,
    PatternVisualizer,
    PatternConfig
)

# Generate and visualize patterns
config = PatternConfig(
    pattern_type='dilated_sparse',
    sparsity_ratio=0.1
)

generator = SparsePatternGenerator(config)
pattern = generator.generate_pattern(seq_len=4096, num_heads=8)

# Visualize the pattern
visualizer = PatternVisualizer()
visualizer.visualize_pattern(
    pattern,
    title="Dilated Sparse Pattern (90% sparse)",
    save_path="sparse_pattern.png"
)
