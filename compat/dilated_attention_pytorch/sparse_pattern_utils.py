"""The old import path of the pattern tools of `dilated_attention_pytorch`."""

from dilated_attention_pytorch import (
    PatternConfig as PatternConfig,
    PatternMetrics as PatternMetrics,
    PatternQualityAnalyzer as PatternQualityAnalyzer,
    PatternVisualizer as PatternVisualizer,
    SparsePatternGenerator as SparsePatternGenerator,
    pattern_statistics as pattern_statistics,
)
