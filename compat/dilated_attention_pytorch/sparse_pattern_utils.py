"""The old import path of the pattern tools of `dilated_attention_pytorch`."""

from dilated_attention_pytorch import (
    PatternConfig as PatternConfig,
    PatternMetrics as PatternMetrics,
    PatternQualityAnalyzer as PatternQualityAnalyzer,
    PatternType as PatternType,
    PatternVisualizer as PatternVisualizer,
    SparsePatternGenerator as SparsePatternGenerator,
    analyze_pattern_statistics as analyze_pattern_statistics,
    pattern_statistics as pattern_statistics,
)
