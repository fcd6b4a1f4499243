"""Models of transformers whose rows several ranks share, against eager attention on one process."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from families import model_of
from oracle import refused
from processes import counted_traffic, on_ranks
from tiny import DECODER, config_of, hf
from torch import Tensor, nn

from ringtile.distributed import Layout
from ringtile.distributed.failures.faults import handshakes
from ringtile.functional import attention
from ringtile.integrations.transformers import context_parallel, register, use_ringtile
from ringtile.patterns import GlobalTokens, Window

TOKENS = 1000
WINDOW = 40
SIZES = dict(max_position_embeddings=4096, sliding_window=WINDOW, attention_chunk_size=100, attention_dropout=0.0)


def new_model(name: str, dtype: torch.dtype = torch.float32, **change: Any) -> Any:
    return model_of(*config_of(name, **SIZES | change), "eager", dtype).train()


@contextmanager
def in_float64() -> Iterator[None]:
    """Norms, rotary angles, softmax and losses cast to float32. Keep float64, in recomputations and threads, too."""
    to, softmax = Tensor.to, nn.functional.softmax

    def kept_to(x: Tensor, *args: Any, **options: Any) -> Tensor:
        narrows = torch.float32 in args or options.get("dtype") is torch.float32
        return x if x.dtype == torch.float64 and narrows else to(x, *args, **options)

    def kept_softmax(x: Tensor, *args: Any, **options: Any) -> Tensor:
        if x.dtype == torch.float64:
            options.pop("dtype", None)
        return softmax(x, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "to", kept_to)
        narrow = (torch.float16, torch.bfloat16, torch.float32)
        patch.setattr(Tensor, "float", lambda x: to(x, torch.float32 if x.dtype in narrow else torch.float64))
        patch.setattr(nn.functional, "softmax", kept_softmax)
        yield


Batch = dict[str, Any]


@cache
def batch_of(kind: str) -> Batch:
    """Rows of 1,000 tokens: plain, with padding, or of other documents in each."""
    ids = torch.randint(3, 97, (2, TOKENS), generator=torch.Generator().manual_seed(3))
    mask, labels = torch.ones(2, TOKENS, dtype=torch.int64), ids.clone()
    if kind in ("left", "right"):
        for row, padding in enumerate((200, 37)):
            mask[row, slice(padding) if kind == "left" else slice(TOKENS - padding, None)] = 0
        labels[mask == 0] = -100
        return {"input_ids": ids, "labels": labels, "attention_mask": mask}
    if kind == "packed":
        rows = ([300, 5, 400, 295], [129, 700, 171])
        positions = torch.stack([torch.cat([torch.arange(n) for n in lengths]) for lengths in rows])
        return {"input_ids": ids, "labels": labels.masked_fill(positions == 0, -100), "position_ids": positions}
    return {"input_ids": ids, "labels": labels}


class Step(NamedTuple):
    logits: Tensor
    loss: Tensor
    grads: dict[str, Tensor]


def grads_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def step_alone(model: Any, kind: str) -> Step:
    batch = dict(batch_of(kind))
    if kind == "left" and model.loss_type == "ForCausalLM":
        # The last padding token has no keys and no label.
        last = batch["attention_mask"].diff(dim=1, prepend=-torch.ones(2, 1)) == 1
        batch["labels"] = batch["labels"].masked_fill(last, -100)
    # A cache would hide packed documents.
    out = model(**batch, use_cache=False)
    out.loss.backward()
    return Step(out.logits.detach(), out.loss.detach(), grads_of(model))


@cache
def expected(name: str, dtype: torch.dtype, kind: str) -> Step:
    return step_alone(new_model(name, dtype), kind)


def step_shared(models: list[Any], kind: str, layout: Any, **options: Any) -> Step:
    """A step of ranks as threads."""

    def run(rank: int) -> tuple[Tensor, Tensor]:
        cp = context_parallel(models[rank], None, layout, **options)
        out = models[rank](**cp.shard_batch(batch_of(kind)))
        out.loss.backward()
        return cp.unshard(out.logits), cp.loss(out.loss)

    found = on_ranks(len(models), run)
    assert all(torch.equal(logits, found[0][0]) for logits, _ in found)
    each = [grads_of(model) for model in models]
    return Step(*found[0], {name: sum(grads[name] for grads in each if name in grads) for name in each[0]})


def error_of(found: Step, wanted: Step, kind: str) -> tuple[float, float]:
    """Errors of logits and gradients, by the largest entry of each tensor."""
    real = batch_of(kind).get("attention_mask", torch.ones(2, TOKENS)).bool()
    logits = (found.logits - wanted.logits)[real].abs().max() / wanted.logits[real].abs().max()
    assert found.grads.keys() == wanted.grads.keys()
    errors = []
    for name, grad in wanted.grads.items():
        largest = grad.abs().max()
        errors.append((found.grads[name] - grad).abs().max() / (largest if largest > 0 else 1))
    return float(logits), float(max(errors))


@pytest.mark.parametrize(
    ("name", "kind", "ranks", "layout"),
    [
        ("Gemma3", "packed", 4, "zigzag"),
        ("gpt-oss", "right", 4, "zigzag"),
        ("gpt-oss", "packed", 2, "contiguous"),
    ],
)
def test_logits_and_gradients_are_those_of_one_process_in_float64(
    name: str, kind: str, ranks: int, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {}
    if name == "gpt-oss" and kind == "packed":
        options["documents"] = True
        keep_documents_of_gpt_oss(monkeypatch)
    with in_float64():
        wanted = expected(name, torch.float64, kind)
        found = step_shared([new_model(name, torch.float64) for _ in range(ranks)], kind, layout, **options)
    assert max(error_of(found, wanted, kind)) < 1e-11
    assert abs(found.loss - wanted.loss) < 1e-12


def keep_documents_of_gpt_oss(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers 5.23 does not hand its position_ids to its masks."""
    from transformers.models.gpt_oss import modeling_gpt_oss as module

    for name in ("create_causal_mask", "create_sliding_window_causal_mask"):
        make = partial(getattr(module, name), position_ids=batch_of("packed")["position_ids"])
        # Ranks read a shard, whatever the masks are told.
        monkeypatch.setattr(
            module,
            name,
            lambda make=make, **how: make(**how) if how["inputs_embeds"].shape[1] == TOKENS else make.func(**how),
        )


@pytest.mark.parametrize(
    "case",
    (
        "Mistral-left-2-zigzag; Gemma3-packed-4-contiguous; gpt-oss-left-4-contiguous; Gemma2-plain-2-striped; "
        "Llama 4-left-4-zigzag; Llama 4-packed-2-zigzag; ModernBERT-plain-4-zigzag"
    ).split("; "),
)
def test_logits_and_gradients_are_those_of_one_process_in_float32(case: str) -> None:
    name, kind, ranks, layout = case.rsplit("-", 3)
    model = new_model(name)
    register()
    model.set_attn_implementation("ringtile")
    if model.config._attn_implementation != "ringtile":
        pytest.skip(f"transformers {hf.__version__} does not switch the attention of {name}")
    wanted = expected(name, torch.float32, kind)
    found = step_shared([new_model(name) for _ in range(int(ranks))], kind, layout)
    logits, grads = error_of(found, wanted, kind)
    assert logits < 5e-6
    assert grads < 1e-5


def test_packed_documents_of_gpt_oss_see_one_another_as_in_transformers() -> None:
    wanted = expected("gpt-oss", torch.float32, "packed")
    with pytest.warns(UserWarning, match="GptOssForCausalLM does not hand position_ids to its masks"):
        found = step_shared([new_model("gpt-oss")], "packed", "zigzag")
    assert max(error_of(found, wanted, "packed")) < 1e-5
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        apart = step_shared([new_model("gpt-oss")], "packed", "zigzag", documents=True)
    assert error_of(apart, wanted, "packed")[0] > 0.01


@pytest.mark.parametrize("kind", ["left", "packed"])
def test_a_pattern_counts_from_the_first_token_of_the_whole_row_or_document(kind: str) -> None:
    pattern = Window(30) | GlobalTokens(5)
    wanted = step_alone(use_ringtile(new_model("Mistral"), pattern), kind)
    found = step_shared([new_model("Mistral") for _ in range(2)], kind, "zigzag", pattern=pattern)
    assert max(error_of(found, wanted, kind)) < 1e-5
    assert error_of(found, expected("Mistral", torch.float32, kind), kind)[0] > 0.01


def test_dropout_of_attention_is_that_of_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    # Threads share a generator of seeds, and processes with one seed draw the same.
    monkeypatch.setattr(attention, "drawn_seed", lambda seed, query: torch.tensor([query.shape[1] + 11]))
    wanted = step_alone(use_ringtile(new_model("Mistral", attention_dropout=0.2)), "plain")
    found = step_shared([new_model("Mistral", attention_dropout=0.2) for _ in range(2)], "plain", "zigzag")
    assert max(error_of(found, wanted, "plain")) < 1e-5
    assert error_of(found, expected("Mistral", torch.float32, "plain"), "plain")[0] > 0.01


def test_layers_of_windows_receive_one_tile_per_boundary() -> None:
    models = [new_model("Gemma3") for _ in range(4)]

    def run(rank: int) -> tuple[int, list[Any]]:
        cp = context_parallel(models[rank], None, "contiguous")
        with torch.no_grad():
            sharded = cp.shard_batch(batch_of("plain"))
            models[rank](**sharded)
        return local.traffic.received, cp.report()

    with counted_traffic() as local:
        found = on_ranks(4, run)
    tile = 2 * 128 * 2 * (16 + 16) * 4
    for rank, (received, (window, full)) in enumerate(found):
        assert window.kind == f"causal & window({WINDOW - 1})"
        assert window.received == (tile if rank else 0)
        assert (window.calls, full.calls) == (1, 1)
        # Shards have two tiles; the last tile has 104 tokens.
        assert full.received == 3 * 2 * tile
        assert full.gathered == window.gathered
        assert received == window.received + full.received


def test_a_plan_of_documents_is_compared_once_per_batch_and_kind_of_layer() -> None:
    models = [new_model("Gemma3") for _ in range(2)]

    def run(rank: int) -> list[int]:
        cp = context_parallel(models[rank], None, "contiguous")
        counts = []
        for kind in ("plain", "plain", "packed", "packed"):
            before = handshakes()
            dist.barrier()
            with torch.no_grad():
                models[rank](**cp.shard_batch(batch_of(kind)))
            dist.barrier()
            counts.append(handshakes() - before)
        return counts

    # Both threads count together.
    assert on_ranks(2, run)[0] == [4, 0, 4, 0]


def test_accelerate_refuses_windows_and_strips_masks() -> None:
    from accelerate.big_modeling import _attach_context_parallel_hooks

    with refused(r"does not support attention layers of type \['sliding_attention'\]"):
        _attach_context_parallel_hooks(new_model("Mistral"))
    config = hf.LlamaConfig(**DECODER)
    model = hf.LlamaForCausalLM(config)

    def run(rank: int) -> None:
        cp = context_parallel(model)
        _attach_context_parallel_hooks(model)
        with refused("attention_mask: expected the layer's rule, got none"):
            model(**cp.shard_batch(batch_of("plain")))

    on_ranks(1, run)


def assert_refused(model: Any, words: str, **options: Any) -> None:
    def run(rank: int) -> None:
        before = model.config._attn_implementation
        with refused(words):
            context_parallel(model, **options)
        assert model.config._attn_implementation == before

    on_ranks(1, run)


def changed(**attributes: Any) -> Any:
    model = new_model("Mistral")
    for name, value in attributes.items():
        setattr(model, name, value)
    return model


DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
T5 = dict(vocab_size=97, d_model=32, d_kv=8, d_ff=32, num_layers=1)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**DECODER, rope_parameters=DYNAMIC)),
            "rope_type: expected one that does not depend on the longest position, got 'dynamic'",
        ),
        (lambda: new_model("gpt-oss", output_router_logits=True), "output_router_logits: expected False, got True"),
        (
            lambda: hf.T5ForConditionalGeneration(hf.T5Config(**T5)),
            "model: expected one without cross attention, got T5ForConditionalGeneration",
        ),
        (
            lambda: hf.MptForCausalLM(hf.MptConfig(vocab_size=97, d_model=32, n_heads=4, n_layers=1)),
            "model: expected parts that use transformers' attention interface, got Mpt",
        ),
        (
            lambda: hf.MambaForCausalLM(hf.MambaConfig(vocab_size=97, hidden_size=32, num_hidden_layers=1)),
            r"model: expected layers of attention, got \['(linear_attention|mamba)'\] in MambaForCausalLM",
        ),
        (lambda: changed(part=nn.Conv1d(64, 64, 3)), "model: expected no convolutions over tokens, got one in Mistral"),
        (
            lambda: changed(forward=lambda input_ids, position_ids, use_cache: None),
            "model: expected one that hands arguments on to its attention, got: .* argument 'cp_batch'",
        ),
        (lambda: changed(forward=lambda **arguments: None), "model: expected attention layers, got none in Mistral"),
    ],
)
def test_models_that_cannot_be_shared_are_refused(make: Callable[[], Any], words: str) -> None:
    assert_refused(make(), words)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"layout": "spiral"}, "layout: expected one of contiguous, zigzag, striped or a function, got 'spiral'"),
        ({"documents": "yes"}, "documents: expected True, False or None, got 'yes'"),
        ({"pattern": 3}, "pattern: expected a Pattern"),
        ({"group": "all"}, "group: expected a ProcessGroup, a DeviceMesh or None, got str"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], words: str) -> None:
    assert_refused(new_model("Mistral"), words, **options)


IDS = torch.ones(1, 300, dtype=torch.int64)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"input_ids": None}, r"batch: expected input_ids or inputs_embeds, got \['input_ids'\]"),
        ({"labels": IDS[:, 1:]}, "labels: expected shape"),
        ({"attention_mask": IDS[:, 1:]}, "attention_mask: expected shape"),
        ({"attention_mask": IDS[None, :, None]}, "attention_mask: expected shape"),
        ({"pixel_values": torch.ones(1, 3, 8, 8)}, "pixel_values: expected attention_mask, input_ids"),
        ({"use_cache": True}, "use_cache: expected False in context parallelism"),
        ({"output_router_logits": True}, "output_router_logits: expected False in context parallelism"),
        ({"past_key_values": object()}, "past_key_values: expected None in context parallelism, got object"),
        ({"cache": object()}, "cache: expected None in context parallelism, got object"),
    ],
)
def test_batches_that_cannot_be_shared_are_refused(change: dict[str, Any], words: str) -> None:
    model = new_model("Mistral")

    def run(rank: int) -> None:
        cp = context_parallel(model)
        with refused(words):
            cp.shard_batch({"input_ids": IDS, **change})

    on_ranks(1, run)


def test_facts_masks_and_shards_that_do_not_fit_are_named() -> None:
    model = new_model("Mistral")

    def run(rank: int) -> None:
        cp = context_parallel(model)
        sharded = cp.shard_batch({"input_ids": IDS, "labels": IDS})
        for change, words in (
            ({"cp_batch": None}, "cp_batch: expected the facts of the batch, got None"),
            ({"attention_mask": IDS}, "attention_mask: expected none in a model whose tokens are shared"),
            (
                {"input_ids": IDS[:, :20], "position_ids": IDS[:, :20], "labels": None},
                "expected the 300 tokens of rank 0",
            ),
            ({"past_key_values": hf.DynamicCache(), "use_cache": True, "input_ids": IDS}, None),
        ):
            if words is None:
                model(**{**sharded, **change})
                words = "use_cache: expected False in context parallelism, got 300 queries, 600 keys"
            with refused(words):
                model(**{**sharded, **change})

    on_ranks(1, run)


def test_ranks_with_other_rows_are_named() -> None:
    models = [new_model("Mistral") for _ in range(3)]

    def run(rank: int) -> None:
        cp = context_parallel(models[rank], None, "contiguous")
        batch = dict(batch_of("plain"))
        assert cp.shard_batch(batch)["input_ids"].shape == (2, (256, 384, 360)[rank])
        if rank == 1:
            batch["labels"] = batch["labels"].clone().index_fill_(1, torch.tensor([700]), 5)
        with refused(r"got others at \[1\] than at 0; a dataloader that deals different rows"):
            cp.shard_batch(batch)

    on_ranks(3, run)


def test_a_rank_without_tokens_is_refused_and_smaller_units_help() -> None:
    models = [new_model("Mistral") for _ in range(2)]

    def run(rank: int) -> None:
        short = {"input_ids": IDS[:, :100], "labels": IDS[:, :100]}
        large = context_parallel(models[rank], None, lambda n: Layout.contiguous(n, 2, unit=128))
        with refused(r"layout: expected tokens at every rank, got none at \[0\] from 100 tokens"):
            large.shard_batch(short)
        cp = context_parallel(models[rank], None, "zigzag")
        assert models[rank](**cp.shard_batch(short)).loss.isfinite()
        wrong = context_parallel(models[rank], None, lambda n: Layout.contiguous(n, 3))
        with refused("layout: expected one of 100 tokens for 2 ranks, got Layout"):
            wrong.shard_batch(short)

    on_ranks(2, run)


def test_labels_are_shifted_over_the_whole_row_and_counted_for_all_ranks() -> None:
    models = [new_model("Mistral") for _ in range(2)]
    batch = batch_of("left")

    def run(rank: int) -> Any:
        cp = context_parallel(models[rank], None, "contiguous")
        return cp.shard_batch(batch)

    first, second = on_ranks(2, run)
    labels = torch.cat([first["labels"], second["labels"]], 1)
    assert torch.equal(labels[:, 200:-1], batch["labels"][:, 201:])
    assert (labels[:, -1] == -100).all()
    # Nothing is learned from padding, the token before the first real one included.
    assert (labels[0, :200] == -100).all()
    assert (labels[1, :37] == -100).all()
    assert int(first["num_items_in_batch"]) == int(second["num_items_in_batch"]) == 799 + 962
    assert first["use_cache"] is False
    assert torch.equal(first["shift_labels"], first["labels"])
    assert first["input_ids"].shape == (2, 512)
    assert second["position_ids"][0].tolist() == list(range(512, 1000))


def test_labels_of_a_model_whose_loss_is_no_sum_over_tokens_are_refused() -> None:
    model = hf.LlamaForSequenceClassification(hf.LlamaConfig(**DECODER))
    gpt2 = hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=97, n_embd=32, n_layer=1, n_head=4))

    def run(rank: int) -> None:
        with refused("labels: expected a model whose loss is a sum over tokens"):
            context_parallel(model).shard_batch({"input_ids": IDS, "labels": IDS})
        with refused("position_ids: expected them in the batch"):
            context_parallel(gpt2).shard_batch({"input_ids": IDS})

    on_ranks(1, run)


def test_a_model_that_tunes_queries_by_local_places_is_refused_where_it_matters() -> None:
    kind, config = config_of("Llama 4", **SIZES)
    config.floor_scale, config.no_rope_layers = 500, [1, 0]
    model = kind(config)

    def run(rank: int) -> None:
        cp = context_parallel(model)
        model(**cp.shard_batch({"input_ids": IDS}))
        with refused("attn_temperature_tuning: expected fewer than 500 tokens"):
            model(**cp.shard_batch(batch_of("plain")))

    on_ranks(1, run)


def test_a_loader_yields_parts_and_has_the_attributes_of_the_other() -> None:
    model = new_model("Mistral")

    def run(rank: int) -> None:
        cp = context_parallel(model)
        rows = torch.utils.data.DataLoader([{"input_ids": IDS[0], "labels": IDS[0]}] * 4, batch_size=2)
        loader: Any = cp.loader(rows)
        assert len(loader) == 2
        assert loader.dataset is rows.dataset
        parts = list(loader)
        assert [part["input_ids"].shape for part in parts] == [(2, 300)] * 2
        assert all("cp_batch" in part for part in parts)

    on_ranks(1, run)
