"""The words of the command line: the round trip, and mistakes that point at the character."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from strategies import checkerboard, texts
from torch import nn

from ringtile import (
    SparseTransformer,
    build_index,
    dilated_attention,
    in_slices,
    replace_attention,
    sparse_attention,
)
from ringtile.adaptive import AdaptiveAttention, IndexedAttention, Probe, audit, index_loss, index_topk
from ringtile.distributed import Layout
from ringtile.distributed.plan import make_plan
from ringtile.functional.cache import LayerCache
from ringtile.kernels.reference import attention_reference
from ringtile.patterns import (
    BlockDilated,
    Blocks,
    Causal,
    Dense,
    Documents,
    Elements,
    Pattern,
    RandomBlocks,
    Segments,
    Strided,
    Window,
    bigbird,
    longformer,
    longnet_union,
    parse,
    per_head,
    streaming,
)
from ringtile.tools.predict.cheapest import cheapest_layout

a, b, c = Causal(), Window(3), Strided(7)


@given(texts())
def test_round_trip(pattern: Pattern) -> None:
    assert pattern.text is not None
    assert parse(pattern.text) == pattern
    assert repr(parse(repr(pattern))) == repr(pattern) == pattern.text


@pytest.mark.parametrize(
    ("text", "pattern"),
    [
        ("window(1024)", Window(1024)),
        ("window(5, 0)", Window(5, 0)),
        ("block_dilated([1, 2], 8)", BlockDilated((1, 2), 8)),
        ("block_dilated([1, 2], 8, block=64)", BlockDilated([1, 2], 8, 64)),
        ("random_blocks(3)", RandomBlocks(3)),
        ("random_blocks(3, seed=7, block=64)", RandomBlocks(3, 7, 64)),
        ("segments(2048)", Segments(2048)),
        ("segments(2048, 4)", Segments(2048, 4)),
        ("segments(2048, 4, 1)", Segments(2048, 4, 1)),
        ("segments(2048, 1, 1)", Segments(2048, shift=1)),
        ("documents([100, 0, 200])", Documents([100, 0, 200])),
        ("per_head([causal, ~window(3)])", per_head([a, ~b])),
        ("causal & window(3) & strided(7)", a & b & c),
        ("causal & (window(3) & strided(7))", a & (b & c)),
        ("causal | window(3) | strided(7)", a | b | c),
        ("causal | (window(3) | strided(7))", a | (b | c)),
        ("causal | window(3) & strided(7)", a | b & c),
        ("causal & window(3) | strided(7)", a & b | c),
        ("(causal | window(3)) & strided(7)", (a | b) & c),
        ("causal & (window(3) | strided(7))", a & (b | c)),
        ("~(causal & window(3))", ~(a & b)),
        ("~causal & ~~window(3)", ~a & ~~b),
    ],
)
def test_canonical_text(text: str, pattern: Pattern) -> None:
    assert pattern.text == text == repr(pattern)
    assert parse(text) == pattern
    assert vars(pattern)["text"] == text


@pytest.mark.parametrize(
    ("text", "pattern"),
    [
        ("longformer", longformer()),
        ("longformer:1024", longformer(1024)),
        ("bigbird", bigbird()),
        ("bigbird:2", bigbird(2)),
        ("bigbird(random=2, block=128)", bigbird(2, block=128)),
        (" bigbird : 2 &causal", bigbird(2) & Causal()),
        ("streaming:8 | ~longformer:16", streaming(8) | ~longformer(16)),
        ("streaming(window=128)", streaming(window=128)),
        ("longnet_union", longnet_union()),
        ("longnet_union([8, 16], [1, 2])", longnet_union([8, 16], [1, 2])),
        ("causal()", Causal()),
        ("((causal))", Causal()),
        ("window(left=3,\n\tright=0x10)", Window(3, 16)),
        ("window(1_024)", Window(1024)),
        ("window(1K, 0)", Window(1024, 0)),
        ("documents([16K,2M, 3])", Documents([16384, 2 << 20, 3])),
        ("streaming:1K & window(left=2K)", streaming(1024) & Window(2048)),
        ("per_head([streaming:2, dense,])", per_head([streaming(2), Dense()])),
    ],
)
def test_other_ways_to_say_it(text: str, pattern: Pattern) -> None:
    assert parse(text) == pattern


def test_some_patterns_have_no_text() -> None:
    unworded = [
        Elements(checkerboard),
        Blocks(torch.ones(1, 1, dtype=torch.bool)),
        Documents(ids=torch.tensor([1])),
    ]
    for pattern in unworded:
        compositions = (pattern, Causal() & pattern, pattern | Causal(), ~pattern, per_head([Causal(), pattern]))
        assert [composition.text for composition in compositions] == [None] * 5
        assert "without a text form" in repr(pattern)


@pytest.mark.parametrize(
    ("text", "at", "message"),
    [
        ("", 0, "empty text"),
        ("causal & windw(3)", 9, "unknown pattern 'windw', did you mean 'window'?"),
        ("causal & zzz", 9, "known: dense, causal, window,"),
        ("causal & window", 9, "window(left, [right]) needs its arguments"),
        ("causal & window()", 9, "needs 'left'"),
        ("window(-3)", 7, "left=-3"),
        ("window(3, -4)", 10, "right=-4"),
        ("window(3, right=-4)", 16, "right=-4"),
        ("window(1, 2, 3)", 13, "takes 2 arguments"),
        ("window(lft=3)", 7, "no argument 'lft', did you mean 'left'?"),
        ("window(3, left=4)", 10, "'left' twice"),
        ("window(3.5)", 7, "whole number"),
        ("window(causal)", 7, "whole number"),
        ("window(1K, 3) & windw(3)", 16, "unknown pattern 'windw'"),
        ("window(K1)", 7, "unexpected character 'K'"),
        ("window(1.5K)", 9, "decimal literal"),
        ("window(3 - 4)", 7, "whole number"),
        ("dilated(3, 4)", 8, "a list for 'rates'"),
        ("dilated([1, x], 4)", 12, "whole number"),
        ("dilated([1, 0], 4)", 8, "rates=0"),
        ("strided(0) | causal", 8, "stride=0"),
        ("causal(3)", 7, "takes 0 arguments"),
        ("documents([1], ids=3)", 15, "no argument 'ids'"),
        ("per_head([causal, 3])", 18, "expected patterns"),
        ("per_head(causal)", 9, "a list for 'patterns'"),
        ("per_head([])", 9, "non-empty"),
        ("per_head([causal]) & per_head([causal, dense])", 21, "same num_heads, got 1 and 2"),
        ("causal - window(3)", 7, "unexpected character '-'"),
        ("causal & é", 9, "unexpected character 'é'"),
        ("causal and dense", 0, "combined with &, | and ~"),
        ("3", 0, "combined with &, | and ~"),
        ("window(3)(4)", 0, "combined with &, | and ~"),
        ("causal &", 8, "combined with &, | and ~"),
        ("causal causal", 7, "combined with &, | and ~"),
        ("  causal & ) ", 11, "cannot read this: unmatched ')'"),
        ("global(64)", 0, "unknown pattern 'global', did you mean 'global_tokens'?"),
        ("causal & (window(3) | class)", 22, "unknown pattern 'class'; known: dense, causal, "),
        ("(causal", 0, "never closed"),
        ("causal)", 6, "unmatched"),
        ("bigbird:", 7, "whole number after the colon"),
        ("causal & window:3", 15, "only a preset (longformer,"),
        ("bigbird:2 & streaming:3 & windw(3)", 26, "unknown pattern 'windw'"),
        ("bigbird:2 & (streaming:3", 12, "never closed"),
        ("bigbird:3000000000 | dense", 8, "per_row=3000000000"),
        ("longnet_union([1, 2], [3])", 22, "dilation_rates"),
        ("__import__('os')", 11, "unexpected character"),
        ("lambda: causal", 6, "only a preset"),
    ],
)
def test_a_mistake_points_at_the_character(text: str, at: int, message: str) -> None:
    with pytest.raises(ValueError, match="\n") as caught:
        parse(text)
    said, shown, caret = str(caught.value).split("\n")
    assert message in said
    assert shown.removeprefix("  ") == text.rstrip()
    assert caret == "  " + " " * at + "^"


def test_only_the_neighbourhood_of_a_mistake_is_shown() -> None:
    text = "causal & " * 100 + "windw(3)" + " | dense" * 100
    with pytest.raises(ValueError, match="windw") as caught:
        parse(text)
    _, shown, caret = str(caught.value).split("\n")
    assert len(shown) < 200
    assert shown[caret.index("^") :].startswith("windw(3)")


def test_many_short_forms_do_not_move_the_place() -> None:
    with pytest.raises(ValueError, match="left=3000000000") as caught:
        parse("longformer:1 | " * 12 + "longformer:3000000000")
    _, shown, caret = str(caught.value).split("\n")
    assert shown[caret.index("^") :] == "3000000000"


@pytest.mark.parametrize(
    "text", ["~" * 20_000 + "causal", "causal" + " & causal" * 5_000, "(" * 300 + "causal" + ")" * 300]
)
def test_endless_nesting_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match="nested"):
        parse(text)


@pytest.mark.parametrize("text", [None, 3, b"causal", Causal()])
def test_not_a_text(text: object) -> None:
    with pytest.raises(ValueError, match="text="):
        parse(text)  # type: ignore[arg-type]


@given(st.text(alphabet="causlwindo_3[](),&|~: =-\n", max_size=30))
def test_any_text_is_a_pattern_or_a_value_error(text: str) -> None:
    try:
        pattern = parse(text)
    except ValueError as error:
        last_line = str(error).split("\n")[-1]
    else:
        last_line = "^" if isinstance(pattern, Pattern) else ""
    assert last_line.strip() == "^"


def test_parsing_is_cached() -> None:
    assert parse("window(12345)") is parse("window(12345)")


def test_every_function_and_module_takes_a_text() -> None:
    q, text, rule = torch.randn(1, 4, 40, 16), "causal & window(3)", Causal() & Window(3)
    heads = torch.randn(1, 40, 16)
    indexed = IndexedAttention(4, 16, keys=24, dim=4).eval()
    calls: list[Callable[[Any], Any]] = [
        lambda given: sparse_attention(q, q, q, given),
        lambda given: sparse_attention(q, q, q, given, is_causal=True, softcap=2.0),
        lambda given: sparse_attention(q, q, q, per_head([given, "dense", given, given])),
        lambda given: dilated_attention(q, q, q, [16, 8], [2, 1], pattern=given),
        lambda given: in_slices(2)(q, q, q, given),
        lambda given: attention_reference(q, q, q, given)[0],
        lambda given: LayerCache(given).attend(q, q, q),
        lambda given: AdaptiveAttention(Probe("first")).new_cache(given).attend(q, q, q),
        lambda given: AdaptiveAttention()(q, q, q, given),
        lambda given: indexed(q, q, q, given),
        lambda given: index_topk(q, q, 4, groups=4, pattern=given),
        lambda given: index_loss(q, q, q, q, groups=4, pattern=given),
        lambda given: audit(q, q, q, build_index(rule, 40), reference=given).recall,
        lambda given: build_index(given, 40).keys_of(torch.arange(40)),
    ]
    for call in calls:
        torch.manual_seed(0)
        wanted = call(rule)
        torch.manual_seed(0)
        assert torch.equal(call(text), wanted)
    assert make_plan(text, Layout.contiguous(400, 2), 0) == make_plan(rule, Layout.contiguous(400, 2), 0)
    assert cheapest_layout({text: 2, "causal": 1}, 1 << 12, 2) == cheapest_layout({rule: 2, a: 1}, 1 << 12, 2)
    assert SparseTransformer(3, 16, 4, pattern=text).layers[2].pattern == rule
    assert [layer.pattern for layer in SparseTransformer(2, 16, 4, pattern=[text, None]).layers] == [rule, None]
    model = replace_attention(nn.MultiheadAttention(16, 4, batch_first=True), pattern=text)
    assert torch.equal(model(heads, heads, heads)[0], replace_attention(model, pattern=rule)(heads, heads, heads)[0])


@pytest.mark.parametrize(
    "text", ["causal & window(3)", "neighborhood([8, 64], 5)", "neighborhood([8, 64], 5, tile=[4, 8])"]
)
def test_a_text_in_a_graph(text: str) -> None:
    torch._dynamo.reset()
    q = torch.randn(1, 2, 512, 16)
    for is_causal in (False, True):
        attend = torch.compile(
            lambda x, causal: sparse_attention(x, x, x, text, is_causal=causal), backend="eager", fullgraph=True
        )
        wanted = attention_reference(q, q, q, Causal() & parse(text) if is_causal else parse(text))[0]
        assert (attend(q, is_causal) - wanted).abs().max() < 1e-5


def test_a_mistake_in_a_text_names_the_argument() -> None:
    with pytest.raises(ValueError, match=r"\Apattern: unknown pattern 'windw', did you mean 'window'\?\n  windw\(3\)"):
        sparse_attention(*torch.zeros(3, 1, 1, 8, 4), "windw(3)")
