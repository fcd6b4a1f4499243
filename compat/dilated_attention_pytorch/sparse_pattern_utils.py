"""The old import path of the pattern tools of `ringtile.compat`."""

from ringtile.compat import PatternConfig as PatternConfig
from ringtile.compat import PatternMetrics as PatternMetrics
from ringtile.compat import PatternQualityAnalyzer as PatternQualityAnalyzer
from ringtile.compat import PatternVisualizer as PatternVisualizer
from ringtile.compat import SparsePatternGenerator as SparsePatternGenerator
from ringtile.compat import pattern_statistics as pattern_statistics
