from dilated_attention_pytorch.sparse_pattern_utils import (
    PatternQualityAnalyzer,
    pattern_statistics
)

analyzer = PatternQualityAnalyzer()

# Analyze pattern quality
metrics = analyzer.analyze_pattern_quality(
    sparse_pattern=pattern,
    reference_attention=dense_attention_weights
)

print(f"Coverage: {metrics.coverage_ratio:.2%}")
print(f"Locality: {metrics.locality_score:.2%}")
print(f"Efficiency: {metrics.efficiency_score:.2f}x")
print(f"Approximation Error: {metrics.approximation_error:.4f}")

# Get detailed statistics
stats = pattern_statistics(pattern)
print(f"Average row density: {stats['avg_row_density']:.2%}")
print(f"Diagonal density: {stats['diagonal_density']:.2%}")
