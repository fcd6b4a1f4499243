"""Which heads and tokens ranks exchange: pure functions on the host, without communication."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import gcd

from ringtile.distributed.layout import Layout, Run, count_tokens
from ringtile.distributed.runs import placed, with_starts
from ringtile.patterns import Pattern
from ringtile.patterns.wrapped import for_heads


@dataclass(frozen=True)
class HeadPlan:
    """Which heads and tokens a rank exchanges with the others of its row."""

    pattern: Pattern
    """Pattern of all heads."""
    layout: Layout
    """Tokens of the ranks of all rows."""
    rank: int
    """This rank, counted in the layout."""
    n_ranks: int
    """Number of ranks of a row."""
    batch: int
    num_heads: int
    num_kv_heads: int

    def __post_init__(self) -> None:
        if self.num_heads % self.n_ranks:
            degrees = ", ".join(str(n) for n in range(1, self.num_heads + 1) if self.num_heads % n == 0)
            raise ValueError(
                f"query: expected a number of heads that {self.n_ranks} ranks can share equally, got {self.num_heads}; "
                f"degrees that divide it: {degrees}"
            )

    @property
    def me(self) -> int:
        """This rank, counted in its row."""
        return self.rank % self.n_ranks

    @cached_property
    def rows(self) -> Layout:
        """Tokens of each row."""
        return self.layout.merged(self.n_ranks)

    @property
    def row(self) -> int:
        """Number of this rank's row."""
        return self.rank // self.n_ranks

    @cached_property
    def places(self) -> tuple[tuple[Run, ...], ...]:
        """The places of each rank's tokens in those of the row."""
        held = with_starts(self.rows.runs[self.row])
        first = self.row * self.n_ranks
        return tuple(placed(runs, held) for runs in self.layout.runs[first : first + self.n_ranks])

    @cached_property
    def tokens(self) -> tuple[int, ...]:
        """Number of tokens of each rank of the row."""
        return tuple(map(count_tokens, self.places))

    @property
    def n_tokens(self) -> int:
        """Number of tokens of this rank."""
        return self.tokens[self.me]

    @property
    def n_row(self) -> int:
        """Number of tokens of this rank's row."""
        return sum(self.tokens)

    @cached_property
    def heads(self) -> dict[str, tuple[Run, ...]]:
        """For each kind the heads that each rank gets."""
        count, shared = self.num_heads // self.n_ranks, self.num_heads // self.num_kv_heads
        # With 12 query heads, 4 key heads and 6 ranks, rank 1 gets the query heads 2 and 3. Each key head serves 3 of
        # them, so rank 1 gets the key heads 0 and 1, and both are at other ranks, too.
        queries = tuple((rank * count, rank * count + count) for rank in range(self.n_ranks))
        keys = tuple((begin // shared, (end - 1) // shared + 1) for begin, end in queries)
        return {"q": queries, "k": keys, "m": ((0, 1),) * self.n_ranks}

    @property
    def is_shared(self) -> bool:
        """True if several ranks have the same key head."""
        return self.num_kv_heads % self.n_ranks > 0

    @cached_property
    def key_at(self) -> list[int] | None:
        """The own key head of each group of query heads, if not equally many query heads share each; otherwise None.

        >>> from ringtile.patterns import Dense
        >>> HeadPlan(Dense(), Layout.contiguous(1024, 4), 1, 4, 1, 12, 6).key_at
        [0, 1, 1]
        """
        (begin, end), (first, last) = (self.heads[kind][self.me] for kind in "qk")
        shared = self.num_heads // self.num_kv_heads
        # Query heads in groups of this size have the same key head: of the heads 3, 4 and 5 above, 2 share each, so the
        # groups are single heads, and the own key heads 0, 1 and 1.
        alike = gcd(end - begin, shared)
        found = [head // shared - first for head in range(begin, end, alike)]
        return None if found == list(range(last - first)) else found

    @cached_property
    def rule(self) -> Pattern:
        """The pattern of this rank's heads."""
        return for_heads(self.pattern, tuple(range(*self.heads["q"][self.me])), self.num_heads)
