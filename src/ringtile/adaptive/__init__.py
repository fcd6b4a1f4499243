"""Patterns that follow the content, and their measured quality."""

from ringtile.adaptive.quality import QualityReport as QualityReport
from ringtile.adaptive.quality import audit as audit
