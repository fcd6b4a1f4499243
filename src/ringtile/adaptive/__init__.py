"""Patterns that follow the content, and their measured quality."""

from ringtile.adaptive.audit import QualityReport as QualityReport, audit as audit
from ringtile.adaptive.budgets import (
    Budget as Budget,
    Density as Density,
    Gain as Gain,
    Threshold as Threshold,
    TopK as TopK,
    TopP as TopP,
)
from ringtile.adaptive.cache import AdaptiveCache as AdaptiveCache
from ringtile.adaptive.calibration import (
    GRID as GRID,
    Calibration as Calibration,
    HeadFacts as HeadFacts,
    head_facts as head_facts,
)
from ringtile.adaptive.choice import Choice as Choice, select as select
from ringtile.adaptive.control import Controller as Controller, ControlReport as ControlReport
from ringtile.adaptive.indexed import IndexedAttention as IndexedAttention, share_keys as share_keys
from ringtile.adaptive.indexer import index_topk as index_topk
from ringtile.adaptive.losses import index_loss as index_loss
from ringtile.adaptive.scores import (
    Antidiagonal as Antidiagonal,
    Blend as Blend,
    Box as Box,
    Means as Means,
    Probe as Probe,
    Recent as Recent,
    Rounded as Rounded,
    Scores as Scores,
    Shuffled as Shuffled,
    Sum as Sum,
)
from ringtile.adaptive.selection import AdaptiveAttention as AdaptiveAttention
from ringtile.adaptive.view import View as View
