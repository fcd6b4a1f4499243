"""LongNet's dilated attention over tokens that the ranks of a process group share."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Unpack

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ringtile.distributed.attention import ExchangedKeys, check_names, ring_attention
from ringtile.distributed.branches import BranchPlan, Shape, make_branch_plan
from ringtile.distributed.exchange import Exchange, Started, by_number, exchange_of
from ringtile.distributed.layout import (
    Layout,
    PassedOn,
    as_layout,
    check_keys_finite,
    check_shard,
    passed_on,
)
from ringtile.distributed.lockstep import compare, shapes_of
from ringtile.distributed.plan import Source
from ringtile.distributed.process_groups import Ranks, real_group
from ringtile.distributed.transports import group_of
from ringtile.functional.attention import Keywords, check_options, checked_tensors, make_call
from ringtile.functional.dilated import Branch, checked_branches, numbered, over_positions, rules_of, warn_of_uncovered
from ringtile.functional.parts import Part, Places, attend_parts
from ringtile.kernels.contracts import Call, accumulator, merge_into
from ringtile.patterns import Pattern
from ringtile.patterns.grammar import as_rule
from ringtile.patterns.traced import constant
from ringtile.patterns.wrapped import for_heads

_NAMES = frozenset(Keywords.__annotations__)


def ring_dilated_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segment_lengths: Sequence[int],
    dilation_rates: Sequence[int],
    *,
    layout: Layout,
    group: dist.ProcessGroup | DeviceMesh | None = None,
    pattern: Pattern | str | None = None,
    overlap: Literal["mix", "union"] = "mix",
    check_finite: bool | str = False,
    return_lse: bool = False,
    **options: Unpack[Keywords],
) -> Any:
    """Compute `dilated_attention` over all tokens of a layout, each rank its own queries, exactly.

    A branch sends nothing if its segments lie inside the runs of the ranks. Otherwise ranks get the dilated tokens of
    the segments that their own tokens lie in, under ``is_causal`` none behind their last query. All branches share one
    all-to-all per pass, and a token that several branches need travels once. Segments inside a rank are computed
    meanwhile. All ranks make the same calls with the same branches, layout and options.

    Args:
        query: ``[B, H, n, D]``, the rank's n tokens in ascending order of position.
        key, value: ``[B, Hkv, n, D]`` and ``[B, Hkv, n, Dv]``.
        segment_lengths: Segment length w of each branch, in tokens, as in `dilated_attention`.
        dilation_rates: Dilation rate r of each branch.
        layout: Which tokens each rank holds. Contiguous ranks whose shards are multiples of the segments send least.
        group: Process group with as many ranks as the layout, or a mesh with one dimension. Default: all ranks.
        pattern: Which pairs to keep inside a segment. It does not change what travels.
        overlap: "mix" or "union", as in `dilated_attention`. A union of segment lengths that do not divide one another
            is `ring_attention` over one pattern, which sends whole tiles.
        check_finite: Look for NaN and infinity in the rank's keys and values before they travel, as in
            `ring_attention`.
        return_lse: Also return the log-sum-exp (natural log) ``[B, H, n]``.
        options: ``is_causal``, ``key_mask`` ``[B, n]`` of the rank's own keys, ``dropout_p``, ``seed``, ``scale``,
            ``enable_gqa`` and ``backend``, as in `dilated_attention`. All ranks together drop the weights that one
            process drops. Each rank draws its default seed.

    Returns the output ``[B, H, n, Dv]``. With ``return_lse``, also the lse. Both differentiate twice, and compile.

    Raises:
        ValueError: If an argument is invalid, or a key or value is not finite and ``check_finite`` is set.
        PlanMismatch: At every rank, if ranks call with different branches, layouts, shapes or dtypes.
        RankLost: If a rank fails, dies or does not come. The message names it.

    Pass it to a module of a rank as ``attend=``:

    >>> from functools import partial
    >>> from ringtile.modules import SparseTransformer
    >>> layout = Layout.contiguous(1 << 20, 64)
    >>> branches = {"segment_lengths": [2048, 16384, 32768], "dilation_rates": [1, 6, 12]}
    >>> attend = partial(ring_dilated_attention, layout=layout, **branches)
    >>> model = SparseTransformer(2, 64, 4, is_causal=True, attend=attend)
    """
    check_names(options, _NAMES)
    ranks = group_of(group)
    rest: dict[str, Any] = {**options}
    key_mask, is_causal = rest.pop("key_mask", None), rest.pop("is_causal", False)
    query, key, value = checked_tensors(query, key, value, rest.pop("enable_gqa", False))
    rank, _ = check_shard(query, key, layout, ranks)
    check_options(query, key, key_mask=key_mask, **rest)
    at = checked_branches(segment_lengths, dilation_rates)
    pattern = None if pattern is None else as_rule(pattern, "a Pattern between places in a segment")
    branches = rules_of(at, pattern, is_causal, overlap, query.shape[1])
    if branches is None:
        rule = over_positions(at, pattern, overlap)[0]
        return ring_attention(
            query,
            key,
            value,
            rule,
            layout=layout,
            group=group,
            check_finite=check_finite,
            return_lse=return_lse,
            **options,
        )
    warn_of_uncovered(at, query.shape[1], 0, layout.n_tokens)
    if check_finite:
        check_keys_finite(key, value, layout, rank, check_finite)
    shapes, call = shapes_of(query, key, value), make_call(query, **rest)
    numbers = call.scale, call.dropout_p, key_mask is not None
    place = passed_on(layout), ranks, shapes, str(key.dtype), key.device, numbers, torch.compiler.is_compiling()
    # Not the result of the call: Dynamo reads tensors only from places that it can find again.
    exchange = by_number[_prepared(tuple(at), pattern, is_causal, overlap, *place)]
    assert isinstance(exchange.plan, BranchPlan)
    own_mask, buffer_mask = None, None
    if key_mask is not None:
        own_mask = key_mask.unsqueeze(1).expand(-1, key.shape[1], -1).flatten(1)
        buffer_mask = torch.ops.ringtile.cast_bits(own_mask, exchange.number)
    parts = partial(_parts, query, exchange.plan, branches, call)
    items = _Items(parts, own_mask, exchange.plan, exchange, buffer_mask, overlap=True)
    out, lse = attend_parts(_items(query), _items(key), _items(value), items, call.backend)
    out, lse = (x.view(*query.shape[:3], *x.shape[3:]) for x in (out, lse))
    return (out, lse) if return_lse else out


@constant
def _prepared(
    at: tuple[tuple[int, int], ...],
    pattern: Pattern | None,
    is_causal: bool,
    overlap: str,
    layout: PassedOn,
    ranks: Ranks,
    shapes: tuple[int, ...],
    dtype: str,
    device: torch.device,
    numbers: tuple[float, ...],
    in_graph: bool,
) -> int:
    """Return the number of a call's exchange, after a comparison with the other ranks."""
    # Dynamo passes on no rules that it has made.
    branches = rules_of(at, pattern, is_causal, overlap, shapes[1])
    assert branches is not None
    layout = as_layout(layout)
    group = real_group(ranks)
    # A rule for some lengths only does not fit a part of a segment.
    planned = tuple(Shape(each.length, each.dilation, is_causal and each.rule.unbounded) for each in branches)
    plan = make_branch_plan(planned, layout, group.rank(), shapes[1], shapes[2], bool(numbers[2]), device)
    texts = [f"({each.length}, {each.dilation}): {each.rule.text or type(each.rule).__name__}" for each in branches]
    facts: dict[str, str | float] = {"branches": ", ".join(texts), "plan": plan.fingerprint}
    facts |= dict(zip(("scale", "dropout_p", "key_mask"), numbers, strict=True))
    agreed = compare(group, "ring_dilated_attention", layout, shapes, dtype, **facts)
    return exchange_of(Exchange, plan, agreed, group, in_graph=in_graph).number


def _items(x: Tensor) -> Tensor:
    """Return the tokens ``[B, H, n, D]`` of all heads as those of one, ``[B, 1, H * n, D]``."""
    return x.flatten(1, 2).unsqueeze(1)


@dataclass(frozen=True, eq=False)
class _Numbers(Places):
    """Numbered items, each once, as ``shape``: segments, heads, and the tokens of each.

    For the queries 1 and 3 of heads 0 and 1 in one segment of 4 tokens, ``at`` is [1, 3, 5, 7] and ``shape`` (1, 2, 2).
    """

    at: Tensor
    shape: tuple[int, int, int]

    def take(self, x: Tensor) -> Tensor:
        rows: Tensor = x.squeeze(1).index_select(1, self.at).unflatten(1, self.shape).flatten(0, 1)
        return rows

    def take_mask(self, mask: Tensor) -> Tensor:
        # All heads have the same tokens: `make_branch_plan` gives a part heads of one offset if there is a mask.
        return mask[:, self.at.view(self.shape)[:, 0]].flatten(0, 1)

    def put(self, total: Tensor, part: Tensor) -> None:
        total.squeeze(1).index_copy_(1, self.at, self._rows(total, part))

    def merge(self, out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> None:
        # index_select copies, so what is merged goes back.
        mine, my_lse = self.take(out), self.take(lse)
        merge_into(mine, my_lse, more, more_lse)
        self.put(out, mine)
        self.put(lse, my_lse)

    def add(self, total: Tensor, part: Tensor) -> None:
        # No number occurs twice, so the sums do not depend on the order of threads.
        total.squeeze(1).index_add_(1, self.at, self._rows(total, part))

    def _rows(self, total: Tensor, part: Tensor) -> Tensor:
        return part.to(total.dtype).reshape(len(total), len(self.at), *part.shape[3:])


class _Items(ExchangedKeys):
    """Items travel as keys do, but nothing else of ring attention's order of sums applies to them.

    Gradients that arrive are summed and rounded before the own ones are added, and no part comes before the buffers if
    operators are composed. Either order would be right, but would change the last bits.
    """

    is_merged = True
    _waits_composed = True

    def _sums(self, grads: Sequence[Tensor], cold: Started, hot: Started, own: list[Tensor]) -> Sequence[Tensor]:
        arrived = self.exchange.finish_back(grads, cold, hot)
        return [x.to(accumulator(x)).add_(more) for x, more in zip(own, arrived, strict=True)]


def _parts(q: Tensor, plan: BranchPlan, branches: Sequence[Branch], call: Call, source: Source) -> Iterator[Part]:
    """Yield the dense problems on the rank's own items, or those on the buffer."""
    heads, n_tokens = q.shape[1:3]
    for piece in plan.pieces:
        if source != ("own" if piece.is_local else "all"):
            continue
        n_segments = len(piece.segments)
        yield Part(
            _Numbers(piece.rows(n_tokens), (n_segments, len(piece.heads), piece.n_queries)),
            _Numbers(piece.keys(n_tokens, plan), (n_segments, len(piece.key_heads), piece.n_keys)),
            for_heads(branches[piece.branch].rule, piece.heads, heads),
            numbered(call, piece.branch, piece.heads, q.shape[0], piece.segments)._replace(start=piece.first),
            branch=piece.branch,
            # Branches come in no order: the parts on own items are first.
            merges=True,
        )
