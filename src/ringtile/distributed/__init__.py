"""Attention over sequences that several ranks share, on torch.distributed."""

from ringtile.distributed.attend import RingCache as RingCache, ring_attend as ring_attend
from ringtile.distributed.attention import ring_attention as ring_attention
from ringtile.distributed.dilated import ring_dilated_attention as ring_dilated_attention
from ringtile.distributed.failures.errors import PlanMismatch as PlanMismatch, RankLost as RankLost
from ringtile.distributed.failures.faults import watch as watch
from ringtile.distributed.layout import Layout as Layout
from ringtile.distributed.plan import RingPlan as RingPlan, make_plan as make_plan
from ringtile.distributed.roll import roll as roll
from ringtile.distributed.transports import prefetched as prefetched, prepare as prepare
