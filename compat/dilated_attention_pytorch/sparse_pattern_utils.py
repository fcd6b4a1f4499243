"""The old import path of the pattern tools of `dilated_attention_pytorch`."""

from dilated_attention_pytorch import PatternConfig as PatternConfig
from dilated_attention_pytorch import PatternMetrics as PatternMetrics
from dilated_attention_pytorch import PatternQualityAnalyzer as PatternQualityAnalyzer
from dilated_attention_pytorch import PatternVisualizer as PatternVisualizer
from dilated_attention_pytorch import SparsePatternGenerator as SparsePatternGenerator
from dilated_attention_pytorch import pattern_statistics as pattern_statistics
