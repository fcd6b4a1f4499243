"""Rules that read data: an index belongs to the data that a rule reads now, whichever way it reads it."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from oracle import relative_error
from processes import one_rank
from torch import Tensor, nn
from torch.nn.attention.flex_attention import and_masks

from ringtile import build_index, sparse_attention
from ringtile.distributed import Layout, ring_attention
from ringtile.index import cache_info, clear_cache
from ringtile.patterns import Causal, Elements, Pattern, Window, per_head
from ringtile.patterns.blocks import reads_of

N = 40
Rule = Callable[..., Pattern]
table: Any = None
TABLES = [torch.zeros(40, dtype=torch.int64)]
LATE = SimpleNamespace(first=0)
cut = 0


def ids(at: int) -> Tensor:
    return (torch.arange(N) >= at).long()


def look(x: Tensor) -> Tensor:
    found: Tensor = table[x]
    return found


def of_table(head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return look(query) == look(key)


def mask_mod(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
    same: Tensor = table[query] == table[key]
    return same


def of_argument(head: Tensor, query: Tensor, key: Tensor, holder: Any = LATE) -> Tensor:
    return (look_into(holder, query) == look_into(holder, key)) & (query >= holder.first)


def look_into(holder: Any, x: Tensor) -> Tensor:
    found: Tensor = holder.ids[x]
    return found


def everything(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query >= -key


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ids", ids(0))
        self.large = nn.Linear(9, 9)

    def rule(self, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        same: Tensor = self.ids[query] == self.ids[key]
        return same

    forward = rule

    def mask_mod(self, b: Tensor, *rest: Tensor) -> Tensor:
        return self.rule(*rest)

    def inside(self, at: int) -> Pattern:
        self.ids = ids(at)
        return Elements(lambda head, query, key: self.ids[query] == self.ids[key])


class Score(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(ids(0).double())

    def forward(self, x: Tensor) -> Tensor:
        return self.weight[x]


class Holder:
    __slots__ = ("held",)

    def __call__(self, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        same: Tensor = self.held["ids"][query] == self.held["ids"][key]
        return same


def rebound_global(make: Callable[[], Pattern]) -> Callable[[int], Pattern]:
    def at(place: int) -> Pattern:
        global table
        # The address of the last one is free again.
        table = None
        gc.collect()
        table = ids(place)
        return make()

    return at


def ways() -> dict[str, Callable[[int], Pattern]]:
    layer, score, holder, buffer = Layer(), Score(), Holder(), ids(0)
    network = nn.Sequential(score, nn.Identity())

    def attribute(make: Callable[[], Pattern], place: int) -> Pattern:
        layer.ids = ids(place)
        return make()

    def in_place(write: Callable[[Tensor], object], pattern: Pattern, place: int) -> Pattern:
        write(ids(place))
        return pattern

    def of_holder(place: int) -> Pattern:
        holder.held = {"ids": ids(place)}
        return Elements(holder)

    def of_partial(place: int) -> Pattern:
        holder.held = {"ids": ids(place)}
        return given_holder

    def of_default(place: int) -> Pattern:
        LATE.ids = ids(place)
        return Elements(of_argument)

    def number(place: int) -> Pattern:
        global cut
        cut = place
        return Elements(by_number)

    def by_number(head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= cut) == (key >= cut)

    def of_buffer(head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return buffer[query] == buffer[key]

    def of_network(head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return network(query).long() == network(key).long()

    def of_array(head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return torch.from_numpy(array)[query] == torch.from_numpy(array)[key]

    def by_word(head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        same: Tensor = getattr(layer, "i" + "ds")[query] == getattr(layer, "i" + "ds")[key]
        return same

    given_holder = Elements(partial(lambda holder, *rest: holder(*rest), holder))
    array, with_no_gradient = buffer.clone().numpy(), torch.no_grad()(score.weight.copy_)
    both = and_masks(mask_mod, everything)
    return {
        "a global": rebound_global(lambda: Elements(of_table)),
        "a global of a mask_mod": rebound_global(lambda: Elements.from_mask_mod(mask_mod)),
        "masks of FlexAttention": rebound_global(lambda: Elements.from_mask_mod(both)),
        "inside another pattern": rebound_global(lambda: per_head([Window(N) & Elements(of_table)])),
        "a number": number,
        "an argument of a function that it calls": of_default,
        "a method": partial(attribute, lambda: Elements(layer.rule)),
        "a mask_mod that is a method": partial(attribute, lambda: Elements.from_mask_mod(layer.mask_mod)),
        "a module": partial(attribute, lambda: Elements(layer)),
        "the module around it": layer.inside,
        "an object": of_holder,
        "a part of its arguments": of_partial,
        "a buffer in place": partial(in_place, buffer.copy_, Elements(of_buffer)),
        "a buffer by its data": partial(in_place, buffer.data.copy_, Elements(of_buffer)),
        "a module that it calls": partial(in_place, with_no_gradient, Elements(of_network)),
        "an array": partial(in_place, lambda x: array.__setitem__(slice(None), x.numpy()), Elements(of_array)),
        "a name that is computed": partial(attribute, lambda: Elements(by_word)),
    }


UNREAD = ("an array",)
"""What no cache can follow."""


@pytest.mark.parametrize("name", ways())
def test_a_rule_keeps_the_pairs_of_its_data(name: str) -> None:
    pattern_at = ways()[name]
    for at in (10, 30, 20):
        pattern, expected = pattern_at(at), ids(at)[:, None] == ids(at)
        index = build_index(pattern, N)
        assert torch.equal(index.to_dense()[0, 0], expected)
        # Unchanged data has an index already.
        assert (build_index(pattern, N) is index) == (name not in UNREAD)


def test_a_dead_tensor_is_not_the_next_one_at_its_address() -> None:
    rebound_global(lambda: Elements(of_table))(3)
    first, second = reads_of(Elements(of_table)), reads_of(Elements(of_table))
    assert first == second
    rebound_global(lambda: Elements(of_table))(3)
    assert first != second


@pytest.mark.parametrize(
    "rule",
    [
        lambda head, query, key: TABLES[int(head)][query] == TABLES[int(head)][key],
        lambda head, query, key: TABLES[1][query - 60] == TABLES[1][key] * (head >= 0),
    ],
)
def test_a_rule_without_a_value_at_the_first_pair_is_evaluated_anew(rule: Any) -> None:
    for at in (9, 20):
        TABLES[1:] = [ids(at)]
        index = build_index(Elements(rule), 10, N, start=60 if "60" in str(rule.__code__.co_consts) else 0, num_heads=2)
        assert torch.equal(index.to_dense()[0, -1], ids(at)[:10, None] == ids(at))


def test_an_attribute_that_no_rule_reads_changes_nothing() -> None:
    layer = Layer()
    index = build_index(Elements(layer.rule), N)
    layer.large = nn.Linear(3, 3)
    assert build_index(Elements(layer.rule), N) is index


def test_inference_tensors_do_not_count_their_changes() -> None:
    with torch.inference_mode():
        held = ids(10)
        pattern = Elements(lambda head, query, key: held[query] == held[key])
        first = build_index(pattern, N)
        assert build_index(pattern, N) is first
        held.copy_(ids(30))
        assert torch.equal(build_index(pattern, N).to_dense()[0, 0], ids(30)[:, None] == ids(30))


@pytest.fixture
def group() -> Iterator[None]:
    with one_rank():
        yield


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("transport", ["exchange", "gather", "ulysses"])
def test_plans_of_ranks_follow_the_data(transport: Any) -> None:
    q, k, v = torch.randn(3, 1, 2, N, 8, dtype=torch.float64).unbind()
    layer = Layer()
    for at in (10, 30):
        layer.ids = ids(at)
        how: dict[str, Any] = {"layout": Layout.contiguous(N, 1), "transport": transport}
        found = ring_attention(q, k, v, Causal() & Elements(layer.rule), **how)
        keep = (ids(at)[:, None] == ids(at)).tril()
        expected = (q @ k.mT * 8**-0.5).masked_fill(~keep, -torch.inf).softmax(3) @ v
        assert relative_error(found, expected) < 1e-12


LENGTHS = torch.tensor([40, 9, 25])


def padding(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return key < LENGTHS[b]


@pytest.mark.parametrize("backend", [None, "blockwise", "reference"])
def test_a_rule_of_batch_elements(backend: str | None) -> None:
    q, k, v = torch.randn(3, 3, 2, N, 8, dtype=torch.float64).unbind()
    keep = (torch.arange(N) < LENGTHS[:, None])[:, None, None] & torch.ones(N, N, dtype=torch.bool).tril()
    expected = (q @ k.mT * 8**-0.5).masked_fill(~keep, -torch.inf).softmax(3) @ v
    pattern = Causal() & Elements.from_mask_mod(padding, batch=3)
    assert relative_error(sparse_attention(q, k, v, pattern, backend=backend), expected) < 1e-12
    with pytest.raises(ValueError, match="3"):
        sparse_attention(q[:2], k[:2], v[:2], pattern, backend=backend)


@pytest.mark.parametrize(
    "rule",
    [
        padding,
        lambda b, h, query, key: (query >= key) & (b == 0),
        lambda b, h, query, key: key < LENGTHS.tolist()[b],
        lambda b, h, query, key: key < (3 if int(b) else 4),
        lambda b, h, query, key: key < query.new_full((), b),
        and_masks(everything, padding),
    ],
)
def test_a_rule_that_reads_b_needs_the_batch(rule: Any) -> None:
    clear_cache()
    with pytest.raises(ValueError, match="mask_mod: it reads b, so expected from_mask_mod"):
        build_index(Elements.from_mask_mod(rule), N)
    assert cache_info().entries == 0
    with pytest.raises(ValueError, match=r"expects a whole number 1 <= batch"):
        Elements.from_mask_mod(rule, batch=0)
    with pytest.raises(ValueError, match=r"ask batch_row\(b\)"):
        Elements.from_mask_mod(rule, batch=2).allowed(*torch.zeros(3, 1, dtype=torch.int64))
