"""Failures of ranks: facts that differ, ranks that are lost, and the one line that every rank gets."""

from ringtile.distributed.failures.errors import PlanMismatch as PlanMismatch
from ringtile.distributed.failures.errors import RankLost as RankLost
from ringtile.distributed.failures.faults import agree as agree
from ringtile.distributed.failures.faults import handshakes as handshakes
from ringtile.distributed.failures.faults import publish_failure as publish_failure
from ringtile.distributed.failures.faults import verdict as verdict
from ringtile.distributed.failures.faults import wait as wait
from ringtile.distributed.failures.faults import watch as watch
