"""Attention over sequences that several ranks share, on torch.distributed."""

from ringtile.distributed.attention import ring_attention as ring_attention
from ringtile.distributed.layout import Layout as Layout
from ringtile.distributed.plan import RingPlan as RingPlan
from ringtile.distributed.plan import make_plan as make_plan
