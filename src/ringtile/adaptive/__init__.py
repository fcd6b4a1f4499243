"""Patterns that follow the content, and their measured quality."""

from ringtile.adaptive.budgets import Budget as Budget
from ringtile.adaptive.budgets import Density as Density
from ringtile.adaptive.budgets import Threshold as Threshold
from ringtile.adaptive.budgets import TopK as TopK
from ringtile.adaptive.budgets import TopP as TopP
from ringtile.adaptive.calibration import GRID as GRID
from ringtile.adaptive.calibration import Calibration as Calibration
from ringtile.adaptive.calibration import LossCurves as LossCurves
from ringtile.adaptive.calibration import allocate as allocate
from ringtile.adaptive.calibration import loss_curves as loss_curves
from ringtile.adaptive.control import Controller as Controller
from ringtile.adaptive.control import ControlReport as ControlReport
from ringtile.adaptive.quality import QualityReport as QualityReport
from ringtile.adaptive.quality import audit as audit
from ringtile.adaptive.scores import Antidiagonal as Antidiagonal
from ringtile.adaptive.scores import Blend as Blend
from ringtile.adaptive.scores import Box as Box
from ringtile.adaptive.scores import Means as Means
from ringtile.adaptive.scores import Probe as Probe
from ringtile.adaptive.scores import Recent as Recent
from ringtile.adaptive.scores import Scores as Scores
from ringtile.adaptive.scores import Shuffled as Shuffled
from ringtile.adaptive.scores import Sum as Sum
from ringtile.adaptive.selection import AdaptiveAttention as AdaptiveAttention
from ringtile.adaptive.selection import select as select
