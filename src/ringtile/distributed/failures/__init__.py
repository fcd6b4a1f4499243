"""Failures of ranks: plans that differ, ranks that are lost, results that are not finite."""

from ringtile.distributed.failures.faults import PlanMismatch as PlanMismatch
from ringtile.distributed.failures.faults import RankLost as RankLost
from ringtile.distributed.failures.faults import watch as watch
