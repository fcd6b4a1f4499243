"""Attention with a bias of its scores: the operators, their autograd, and pieces of bounded memory.

A kernel adds numbers from memory to its scores, see `Added`. One table per head is read where it is. Everything else is
computed piece by piece: some rows, and the keys that they can meet. The backward pass computes the numbers again.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding

from ringtile.index import BlockIndex
from ringtile.index.schedule import derived
from ringtile.kernels import contracts, operators
from ringtile.kernels.contracts import Added, Call, Rows, accumulator, index_of, new_out
from ringtile.kernels.plans import prepared_of

_BYTES = 1 << 25
"""Most bytes of the numbers of a piece, and as many for their gradients, unless those of one row tile are more."""

_BIAS = f"Tensor[] biases, SymInt[] spec, {operators.schema(Call)}"
operators.library.define(f"forward_biased(Tensor q, Tensor k, Tensor v, {_BIAS}) -> (Tensor, Tensor)")
operators.library.define(f"backward_biased({operators.schema(Rows)}, {_BIAS}) -> (Tensor, Tensor, Tensor, Tensor[])")
FORWARD_BIASED: Callable[..., tuple[Tensor, Tensor]] = torch.ops.ringtile.forward_biased
BACKWARD_BIASED = torch.ops.ringtile.backward_biased


class Term(NamedTuple):
    """Numbers by distance: ``table[h, d]``, or with ``of`` its products with queries or keys, times the scale."""

    table: Tensor
    """``[H or 1, R]`` or ``[H or 1, R, D']``."""
    offset: int = 0
    """Distance ``j - i`` reads place ``j - i + offset``, or the nearest that exists."""
    shape: tuple[int, ...] = ()
    """If not empty, tokens of a grid: the distance is that of their coordinates, and the table has an axis for each."""
    of: Tensor | None = None
    """``[B, H, Nq, D']``, or ``[B, H, Nk, D']`` if ``by_key``."""
    by_key: bool = False

    @property
    def spec(self) -> list[int]:
        """What is no tensor, as numbers."""
        return [0 if self.of is None else 1 + self.by_key, self.offset, len(self.shape), *self.shape]


def _terms(tensors: Sequence[Tensor], spec: Sequence[int]) -> list[Term]:
    """Return the terms of an operator's arguments: the table of each, then what it multiplies."""
    found, left, numbers = [], list(tensors), list(spec)
    while numbers:
        kind, offset, axes = numbers[:3]
        table, of = left.pop(0), left.pop(0) if kind else None
        found.append(Term(table, offset, tuple(numbers[3 : 3 + axes]), of, kind == 2))
        del numbers[: 3 + axes]
    return found


def _places(term: Term, q: Tensor, k: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """Return places of all queries and keys, whose difference is the place in a table without axes."""
    query_at, key_at = (torch.arange(x.shape[2], device=q.device) for x in (q, k))
    query_at += call.start
    if not term.shape:
        return query_at - term.offset, key_at
    # Row-major numbers of the tokens in a grid as large as the table: their differences are those of coordinates.
    linear = torch.zeros(1, dtype=torch.int64, device=key_at.device)
    for size in term.shape:
        linear = (linear.unsqueeze(1) * (2 * size - 1) + torch.arange(size, device=key_at.device)).flatten()
    return linear[query_at] - linear[-1], linear[key_at]


class _Piece(NamedTuple):
    """Rows of queries, and the keys that they can meet."""

    rows: slice
    keys: slice
    tiles: BlockIndex


def _reaches(index: BlockIndex) -> tuple[list[int], list[int]]:
    """Return the first column tile of each row tile in any group, and the one after its last."""
    slot, col = index.slot_and_col(index.entries().number)
    row, low = slot % max(index.n_rows, 1), slot.new_full((index.n_rows,), index.n_cols)
    high = torch.zeros_like(low).scatter_reduce_(0, row, col + 1, "amax")
    return low.scatter_reduce_(0, row, col, "amin").tolist(), high.tolist()


def _row_pieces(index: BlockIndex, most: int) -> list[_Piece]:
    """Cut an index into pieces of at most so many row tiles."""
    block, found, begin = index.block, list[_Piece](), 0
    low, high = derived(index, _reaches)
    while begin < index.n_rows:
        first, last, end = low[begin], high[begin], begin + 1
        # More rows meet more distances, each of which is computed for all of them.
        while end < index.n_rows and end - begin < most:
            first, last, end = min(first, low[end]), max(last, high[end]), end + 1
        # A key mask word has the bits for 32 keys.
        first -= first % max(32 // block, 1)
        if first < last:
            place = (index.first_row + begin) * block - index.start
            rows = slice(max(place, 0), min(place + (end - begin) * block, index.n_queries))
            tiles = (torch.arange(a, b, device=index.device) for a, b in ((begin, end), (first, last)))
            found.append(_Piece(rows, slice(first * block, min(last * block, index.n_keys)), index.remapped(*tiles)))
        begin = end
    return found


class _Cut(NamedTuple):
    """A piece of some batch elements and heads, with the call over it."""

    rows: tuple[slice, slice, slice]
    """Places in ``[B, H, Nq, ...]``."""
    keys: tuple[slice, slice, slice]
    """Places in ``[B, Hkv, Nk, ...]``."""
    call: Call
    places: list[tuple[Tensor, Tensor]]
    """Of all queries and keys, for each term."""
    distance: int
    """From the first query to the first key."""

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Batch elements, heads, queries and keys."""
        batch, heads, rows = (x.stop - x.start for x in self.rows)
        return batch, heads, rows, self.keys[2].stop - self.keys[2].start


def _cuts(q: Tensor, k: Tensor, terms: Sequence[Term], call: Call) -> Iterator[_Cut]:
    """Cut a call in an order that depends on shapes and pairs alone."""
    (batch, heads), key_heads = q.shape[:2], k.shape[1]
    index, ratio, most = index_of(call, q, k), heads // key_heads, _BYTES // accumulator(q).itemsize
    # More rows need fewer sums of gradients of all their keys, but also compute more distances than they meet.
    low, high = derived(index, _reaches)
    # Rows without tiles have a negative one.
    reach = max([1, *(b - a for a, b in zip(low, high, strict=True))])
    tiles = min(max(2, reach // 12), max(index.n_rows, 1))
    while tiles > 1 and index.block**2 * tiles * (2 * tiles + reach) * ratio > most:
        tiles -= 1
    # Several heads at a time, so that threads wait for each other seldom.
    size = index.block**2 * tiles * (2 * tiles + reach)
    fit = min(max(most // (ratio * size), 1), key_heads)
    together = max(x for x in range(1, fit + 1) if key_heads % x == 0) * ratio
    several = max(most // (heads * size), 1) if together == heads else 1
    pieces = derived(index, _row_pieces, tiles, lengths=True)
    places = [_places(term, q, k, call) for term in terms]
    batch_at, head_at = call.batch_at, call.head_at
    if call.dropout_p:
        batch_at = torch.arange(batch, device=q.device) if batch_at is None else batch_at
        head_at = torch.arange(heads, device=q.device) if head_at is None else head_at
    for b in range(0, batch, several):
        for h in range(0, heads, together):
            some, mine = slice(b, min(b + several, batch)), slice(h, min(h + together, heads))
            for rows, keys, part in pieces:
                tensors, bits, lengths = part.tensors(), call.key_bits, call.key_lengths
                # Values that kernels derive from an index need the same tensors at each call.
                if len(tensors[0]) > 1:
                    tensors[0] = tensors[0][some]
                if tensors[0].shape[1] > 1:
                    tensors[0] = tensors[0][:, mine].contiguous()
                if lengths is not None:
                    lengths = (lengths[some] - keys.start).clamp(0, keys.stop - keys.start)
                own = call._replace(
                    start=part.start,
                    tiles=tensors,
                    pattern="",
                    key_bits=None if bits is None else bits[some, keys.start // 32 : -(-keys.stop // 32)],
                    key_lengths=lengths,
                    batch_at=None if batch_at is None else batch_at[some],
                    head_at=None if head_at is None else head_at[mine],
                )
                of_keys = some, slice(mine.start // ratio, -(-mine.stop // ratio)), keys
                yield _Cut((some, mine, rows), of_keys, own, places, keys.start - call.start - rows.start)


def _taken(room: list[Tensor], number: int, *shape: int) -> Tensor:
    """Return memory that the pieces of a call share: pages that are new to a process cost as much as products do."""
    size = math.prod(shape)
    if room[number].numel() < size:
        room[number] = room[number].new_empty(size)
    return room[number][:size].view(shape)


def _slanted(x: Tensor, width: int) -> Tensor:
    """Return the view ``[..., i, j] = x[..., i, j - i + n - 1]`` of contiguous ``[..., n, width + n - 1]``."""
    count, step = x.shape[-2:]
    strides = *x.stride()[:-2], step - 1, 1
    return x.as_strided((*x.shape[:-1], width), strides, x.storage_offset() + count - 1)


class _Products(NamedTuple):
    """The products of a term with a run of distances: of the queries of a cut, or of some of its keys."""

    term: Term
    at: tuple[slice, slice, slice]
    """Of the rows that are multiplied, ``[b, h, n, D']``."""
    first: int
    """Place of the least distance, which may not exist."""
    width: int
    """Tokens of the other side."""

    def operands(self, dtype: torch.dtype, scale: float) -> tuple[Tensor, Tensor]:
        """Return the rows, times the scale, and the distances ``[h or 1, n + width - 1, D']``."""
        table, of = self.term.table, self.term.of
        assert of is not None
        rows = of[self.at].to(dtype) * scale
        table, end = self.mine(table), self.first + rows.shape[2] + self.width - 1
        if 0 <= self.first and end <= table.shape[1]:
            table = table[:, self.first : end]
        else:
            places = torch.arange(self.first, end, device=table.device)
            table = table.index_select(1, places.clamp_(0, table.shape[1] - 1))
        # Seen from a key, a later query is nearer.
        return rows, (table.flip(1) if self.term.by_key else table).to(dtype)

    def mine(self, table: Tensor) -> Tensor:
        """Return the heads of a table."""
        return table if len(table) == 1 else table[self.at[1]]

    def numbers(self, room: list[Tensor], number: int, scale: float) -> Tensor:
        """Return the products by pairs ``[b, h, n, width]``, a view of those by distance."""
        rows, table = self.operands(room[0].dtype, scale)
        found = _taken(room, number, *rows.shape[:3], table.shape[1])
        table = table.mT.expand(*rows.shape[:2], -1, -1)
        torch.bmm(rows.flatten(0, 1), table.flatten(0, 1), out=found.flatten(0, 1))
        return _slanted(found, self.width)

    def add_grads(self, by_distance: Tensor, scale: float, table_grad: Tensor, of_grad: Tensor) -> None:
        """Add the gradients of the table and of the rows from those of the products by distance."""
        rows, table = self.operands(by_distance.dtype, scale)
        if not (rows.sum() + table.sum()).isfinite():
            # What no pair reads can be a NaN, and so is its product with a zero.
            used = by_distance != 0
            rows = rows.masked_fill(~used.any(3, keepdim=True), 0)
            read = used.any(2).any(0)
            read = read.any(0, keepdim=True) if len(table) == 1 else read
            table = table.masked_fill(~read.unsqueeze(2), 0)
        of_grad[self.at] += (by_distance @ table).mul_(scale)
        more, size = (by_distance.mT @ rows).sum(0), table_grad.shape[1]
        more = more.sum(0, keepdim=True) if len(table) == 1 else more
        more = more.flip(1) if self.term.by_key else more
        # Distances beyond an end belong to it.
        low, high = (min(max(x, 0), more.shape[1]) for x in (-self.first, size - self.first))
        total = self.mine(table_grad)
        total[:, low + self.first : high + self.first] += more[:, low:high]
        total[:, 0] += more[:, :low].sum(1)
        total[:, -1] += more[:, high:].sum(1)


def _products(cut: _Cut, term: Term) -> Iterator[tuple[slice, _Products]]:
    """Yield the products of a term, with the keys of the cut that they are for."""
    (batch, heads, rows), keys, (_, _, n_rows, n_keys) = cut.rows, cut.keys[2], cut.shape
    first = cut.distance + term.offset - n_rows + 1
    if not term.by_key:
        yield slice(0, n_keys), _Products(term, (batch, heads, rows), first, n_keys)
        return
    for begin in range(0, n_keys, n_rows):
        end = min(begin + n_rows, n_keys)
        at = batch, heads, slice(keys.start + begin, keys.start + end)
        yield slice(begin, end), _Products(term, at, first + begin, n_rows)


def _pairs_of_table(cut: _Cut, number: int, term: Term) -> Tensor:
    """Return the place in the table of each pair of a cut ``[n, width]``."""
    query_at, key_at = cut.places[number]
    return (key_at[cut.keys[2]] - query_at[cut.rows[2], None]).clamp(0, term.table.flatten(1).shape[1] - 1)


def _added(cut: _Cut, terms: Sequence[Term], room: list[Tensor]) -> Added:
    """Return the sum of all terms of a cut, by pairs, in the first memory of a room."""
    # That of a first term of queries is a view of its products by distance.
    total: Any = None if terms[0].spec[0] == 1 else _taken(room, 0, *cut.shape).zero_()
    for number, term in enumerate(terms):
        if term.of is None:
            table = term.table.flatten(1)
            table = (table if len(table) == 1 else table[cut.rows[1]]).to(room[0].dtype)
            total += embedding(_pairs_of_table(cut, number, term), table.mT).permute(2, 0, 1)
            continue
        for keys, x in _products(cut, term):
            values = x.numbers(room, int(total is not None), cut.call.scale)
            if total is None:
                total = values
            else:
                total[..., keys] += values.mT if term.by_key else values
    key_at = torch.arange(cut.shape[3], dtype=torch.int32, device=total.device)
    return Added(total, torch.zeros(cut.shape[2], dtype=torch.int32, device=total.device), key_at)


def _add_grads(
    cut: _Cut, terms: Sequence[Term], by_distance: Tensor, grad: Tensor, room: list[Tensor], totals: Sequence[Tensor]
) -> None:
    """Add the gradients of all terms from those of the numbers of a cut. Totals are in the order of `_terms`."""
    left = iter(totals)
    for number, term in enumerate(terms):
        total = next(left)
        if term.of is None:
            table = total.flatten(1)
            mine, at = table if len(table) == 1 else table[cut.rows[1]], _pairs_of_table(cut, number, term)
            summed = (grad.sum(1, keepdim=True) if len(table) == 1 else grad).sum(0)
            mine += torch.ops.aten.embedding_dense_backward(summed.permute(1, 2, 0), at, table.shape[1], -1, False).mT
            continue
        of_total = next(left)
        for keys, x in _products(cut, term):
            if number or term.by_key:
                own = grad[..., keys].mT if term.by_key else grad[..., keys]
                by_distance = _taken(room, 1, *own.shape[:3], own.shape[2] + own.shape[3] - 1).zero_()
                _slanted(by_distance, x.width).copy_(own)
            x.add_grads(by_distance, cut.call.scale, total, of_total)


def _whole(term: Term, q: Tensor, k: Tensor, call: Call) -> Added:
    """Return the numbers of a table, for all pairs of a call."""
    query_at, key_at = _places(term, q, k, call)
    # Queries farther away than all places of the table read its ends, and their numbers may not fit.
    query_at, key_at = query_at.clamp(-term.table[0].numel(), k.shape[2]).int(), key_at.int()
    values = term.table.flatten(1).to(accumulator(q)).contiguous().unsqueeze(1)
    return Added(values.expand(*q.shape[:2], -1, -1), query_at, key_at)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, biases: Sequence[Tensor], spec: Sequence[int], *rest: Any
) -> tuple[Tensor, Tensor]:
    call, terms, wide = Call(*rest), _terms(biases, spec), accumulator(q)
    contracts.check_memory(("query", "key", "value", *contracts.OPTIONAL), (q, k, v, *contracts.options_of(call)))
    contracts.check_memory(("bias",) * len(biases), biases)
    compute = contracts.BACKENDS[call.backend].forward
    if len(terms) == 1 and terms[0].of is None:
        added = _whole(terms[0], q, k, call)
        found: tuple[Tensor, Tensor] = compute(q, k, v, call, *prepared_of(q, k, v, call), added=added)
        return found
    out, lse = new_out(q, v.shape[3]).zero_(), q.new_full(q.shape[:3], -torch.inf, dtype=wide)
    room = list(q.new_empty(3, 0, dtype=wide))
    for cut in _cuts(q, k, terms, call):
        # In half precision, the gradients of keys would be rounded once per piece.
        tensors = q[cut.rows].to(wide), k[cut.keys].to(wide), v[cut.keys].to(wide)
        out[cut.rows], lse[cut.rows] = compute(*tensors, cut.call, added=_added(cut, terms, room))
    return out, lse


def _backward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    rows, biases, call = Rows(*arguments[:7]), arguments[7], Call(*arguments[9:])
    contracts.check_memory((*contracts.ROW_NAMES, *contracts.OPTIONAL), (*rows, *contracts.options_of(call)))
    contracts.check_memory(("bias",) * len(biases), biases)
    (q, k, v), terms, wide = rows[2:5], _terms(biases, arguments[8]), accumulator(rows.q)
    compute = contracts.BACKENDS[call.backend].backward
    if len(terms) == 1 and terms[0].of is None:
        added = _whole(terms[0], q, k, call)
        grad = torch.zeros(added.values.shape, dtype=wide, device=q.device)
        grads = compute(rows, call, *prepared_of(q, k, v, call), added=added._replace(grad=grad))
        by_head = grad.squeeze(2).sum(0)
        by_head = by_head.sum(0, keepdim=True) if len(biases[0]) == 1 else by_head
        return *grads, [by_head.view(biases[0].shape).to(biases[0].dtype)]
    sums, totals = ([torch.zeros(x.shape, dtype=wide, device=q.device) for x in each] for each in ((q, k, v), biases))
    room, skewed = list(q.new_empty(3, 0, dtype=wide)), terms[0].spec[0] == 1
    for cut in _cuts(q, k, terms, call):
        at = cut.rows, cut.rows, cut.rows, cut.keys, cut.keys, cut.rows, cut.rows
        part = Rows._make(None if x is None else x[place].to(wide) for x, place in zip(rows, at, strict=True))
        added, (*sizes, width) = _added(cut, terms, room), cut.shape
        # Kernels add the gradients of a first term of queries to those of its products by distance.
        by_distance = _taken(room, 2, *sizes, width + (sizes[2] - 1) * skewed).zero_()
        grad = _slanted(by_distance, width) if skewed else by_distance
        found = compute(part, cut.call, added=added._replace(grad=grad))
        for total, place, more in zip(sums, at[2:5], found, strict=True):
            total[place] += more
        _add_grads(cut, terms, by_distance, grad, room, totals)
    q_grad, k_grad, v_grad = (x.to(q.dtype) for x in sums)
    return q_grad, k_grad, v_grad, [x.to(of.dtype) for x, of in zip(totals, biases, strict=True)]


def _fake_backward(*arguments: Any) -> tuple[Any, ...]:
    return *(x.new_empty(x.shape) for x in arguments[2:5]), [x.new_empty(x.shape) for x in arguments[7]]


operators.register("forward_biased", _forward, operators.fake_forward, 0)
operators.register("backward_biased", _backward, _fake_backward, 0)


def _differentiate(*arguments: Any) -> tuple[Tensor, ...]:
    rows, (spec, n_biases, call), tensors = arguments[:7], arguments[7:10], arguments[10:]
    with torch.autocast(rows[2].device.type, enabled=False):
        *grads, more = BACKWARD_BIASED(
            *rows, tensors[:n_biases], spec, *operators.with_tensors(call, *tensors[n_biases:])
        )
    return *grads, *more


def _compute(
    q: Tensor, k: Tensor, v: Tensor, spec: Sequence[int], n_biases: int, call: Call, *tensors: Tensor
) -> tuple[Tensor, Tensor]:
    call = operators.with_tensors(call, *tensors[n_biases:])
    return FORWARD_BIASED(q, k, v, tensors[:n_biases], spec, *call)


_again = operators.without_derivative(
    _differentiate,
    "attention with a bias has no second derivative, and none in forward mode; with backend='reference' it has",
)
_Attention = operators.differentiable(_compute, _differentiate, _again, 3)


def attend_biased(q: Tensor, k: Tensor, v: Tensor, terms: Sequence[Term], call: Call) -> tuple[Tensor, Tensor]:
    """Return the output and lse of a call with a bias, differentiable in all tensors. The call names its backend."""
    biases = [x for term in terms for x in (term.table, term.of) if x is not None]
    spec = [number for term in terms for number in term.spec]
    if torch.compiler.is_compiling():
        # Dynamo does not pass a tensor twice to a function with a derivative of its own.
        biases = [x.view_as(x) for x in biases]
    if not operators.is_differentiated(q, k, v, *biases):
        return FORWARD_BIASED(q, k, v, biases, spec, *call)
    plain, *tensors = operators.apart(call)
    out, lse = operators.applied(_Attention).apply(q, k, v, spec, len(biases), plain, *biases, *tensors)
    return out, lse
