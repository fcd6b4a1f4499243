"""Models whose scores have a bias: T5, Conformers, DeBERTa, Swin, BLOOM and MPT, without its numbers of all pairs.

Modules that compute such numbers hand over a function in their place. Of a query, a key and the position of the first
query, it returns options of `sparse_attention`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from ringtile.functional.bias import Bias, ByKey, ByQuery, Grid, Relative
from ringtile.integrations.transformers.by_hand import heads_of, replace_methods
from ringtile.integrations.transformers.door import cache_of, refuse_arguments
from ringtile.integrations.transformers.masks import CHOSEN, PatternMask, pattern_mask
from ringtile.patterns import Pattern, Segments, from_mask
from ringtile.patterns.private import assert_async
from ringtile.patterns.traced import constant

_Result = tuple[Tensor, Tensor | None]


def _by_distance(
    module: nn.Module, *_: int, device: Any = None, past_seen_tokens: int | Tensor = 0, **options: Any
) -> Callable[..., Any]:
    """Return the bias of a layer of T5, which its later layers share."""
    refuse_arguments(options)
    return partial(_relative, module, past_seen_tokens)


def _relative(module: Any, past: int | Tensor, query: Tensor, key: Tensor, start: int) -> dict[str, Any]:
    if not hasattr(module, "relative_attention_bias"):
        return {}
    # Each layer makes its own table, so that checkpoints that recompute one give the weight a gradient.
    # Pix2Struct has a decoder only, and does not say so.
    weight, bidirectional = module.relative_attention_bias.weight, not getattr(module, "is_decoder", True)
    farthest = module.relative_attention_max_distance
    sizes = query.shape[2], key.shape[2]
    bias = Relative.t5(weight.to(query.device), *sizes, bidirectional=bidirectional, max_distance=farthest)
    return {"bias": replace(bias, offset=bias.offset + start - int(past))}


def _attend(
    module: Any, heads: Sequence[Tensor], mask: Tensor | None, scale: float, dropout: float, scores: Any, options: Any
) -> _Result:
    """Compute attention by the function of `use_ringtile`. Returns ``[B, N, H * D]``, and weights or None."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    dropout = dropout if module.training else 0.0
    compute = ALL_ATTENTION_FUNCTIONS[CHOSEN]
    out, weights = compute(module, *heads, mask, dropout=dropout, scaling=scale, position_bias=scores, **options)
    return out.flatten(2), weights


def _biased(bias: Bias | tuple[Bias, ...]) -> Callable[..., Any]:
    return lambda query, key, start: {"bias": bias}


def _attend_wav2vec2(
    module: Any, hidden_states: Tensor, attention_mask: Tensor | None = None, **options: Any
) -> _Result:
    """Return the output of the attention of wav2vec2-conformer, w2v-BERT and SeamlessM4T."""
    if module.position_embeddings_type not in ("relative", "relative_key"):
        return type(module).forward(module, hidden_states, attention_mask, **options)  # type: ignore[no-any-return]
    projections = module.linear_q, module.linear_k, module.linear_v
    query, key, value = heads_of(hidden_states, module.head_size, *projections)
    positions = options.pop("relative_position_embeddings", None)
    if module.position_embeddings_type == "relative":
        (table,) = heads_of(positions[0], module.head_size, module.linear_pos)
        bias = ByQuery(query + module.pos_bias_v[:, None], table, query.shape[2] - 1)
        query = query + module.pos_bias_u[:, None]
    else:
        table = module.distance_embedding.weight.to(query.dtype)
        bias = ByQuery(query, table.unsqueeze(0), module.left_max_position_embeddings)
    heads = query, key, value
    scale, dropout = module.scaling, module.dropout.p
    out, weights = _attend(module, heads, attention_mask, scale, dropout, _biased(bias), options)
    return module.linear_out(out), weights


class _Frames(Tensor):
    """The real frames of a batch, bool ``[B, T]``. The encoder of Parakeet makes no mask of all pairs of it."""

    real_frames: Tensor

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ in ("unsqueeze", "expand", "transpose", "__and__", "__invert__"):
            return args[0]
        if func.__name__ == "all":
            # Of the inverted mask, the keys that no query sees.
            return ~args[0].real_frames[:, None]
        return func(*(x.real_frames if isinstance(x, _Frames) else x for x in args), **(kwargs or {}))


def _frames(encoder: Any, *given: Any, **named: Any) -> Tensor:
    real = type(encoder)._get_output_attention_mask(encoder, *given, **named).bool()
    found: _Frames = real.as_subclass(_Frames)
    found.real_frames = real
    return found


def _mask(real: Tensor | None, x: Tensor, rule: Pattern | None = None) -> Tensor:
    """Return the mask of all pairs of real tokens ``[B, N]``, or of those that a rule keeps."""
    from transformers.masking_utils import bidirectional_mask_function

    mask: Any = pattern_mask(
        attention_mask=real,
        batch_size=x.shape[0],
        q_length=x.shape[1],
        kv_length=x.shape[1],
        mask_function=bidirectional_mask_function,
        device=x.device,
    )
    if rule is not None:
        mask.kept = mask.kept._replace(pattern=rule)
    return mask  # type: ignore[no-any-return]


def _attend_parakeet(
    module: Any, hidden_states: Tensor, position_embeddings: Tensor, attention_mask: Any = None, **options: Any
) -> _Result:
    if module.training and getattr(module.config, "dropout_positions", 0.0):
        raise ValueError(f"dropout_positions: expected 0 in training, got {module.config.dropout_positions}")
    if attention_mask is None or isinstance(attention_mask, _Frames):
        attention_mask = _mask(None if attention_mask is None else attention_mask.real_frames, hidden_states)
    query, key, value = heads_of(hidden_states, module.head_dim, module.q_proj, module.k_proj, module.v_proj)
    (table,) = heads_of(position_embeddings[0], module.head_dim, module.relative_k_proj)
    bias = ByQuery(query + module.bias_v[:, None], table, query.shape[2] - 1)
    heads, dropout = (query + module.bias_u[:, None], key, value), module.attention_dropout
    out, weights = _attend(module, heads, attention_mask, module.scaling, dropout, _biased(bias), options)
    return module.o_proj(out), weights


def _convolve_lasr(module: Any, hidden_states: Tensor, attention_mask: Tensor | None = None) -> Tensor:
    if isinstance(attention_mask, PatternMask):
        # The convolution asks for the keys that all queries drop, and one query says it for all.
        real = attention_mask.kept.key_mask
        attention_mask = None if real is None else real[:, None, None]
    return type(module).forward(module, hidden_states, attention_mask)  # type: ignore[no-any-return]


def _attend_granite5(
    module: Any, hidden_states: Tensor, position_embeddings: Any, attention_mask: Tensor | None = None, **options: Any
) -> _Result:
    query, key, value = heads_of(hidden_states, module.head_dim, module.q_proj, module.k_proj, module.v_proj)
    # They count distances from the key to the query.
    bias = ByQuery(query, module.rel_pos_emb.weight.flip(0).unsqueeze(0), module.rel_pos_emb.num_embeddings // 2)
    mask = _mask(attention_mask, hidden_states, Segments(module.context_size))
    heads, dropout = (query, key, value), module.attention_dropout
    out, weights = _attend(module, heads, mask, module.scaling, dropout, _biased(bias), options)
    return module.o_proj(out), weights


def _attend_granite(module: Any, hidden_states: Tensor, attention_dists: Any) -> Tensor:
    hidden_states = module.pre_norm(hidden_states)
    (query,) = heads_of(hidden_states, module.dim_head, module.to_q)
    key, value = heads_of(hidden_states, module.dim_head, module.to_kv)[0].chunk(2, 1)
    bias = ByQuery(query, module.rel_pos_emb.weight.flip(0).unsqueeze(0), module.max_pos_emb)
    mask = _mask(None, hidden_states, Segments(module.context_size))
    out, _ = _attend(module, (query, key, value), mask, module.scale, 0.0, _biased(bias), {})
    return module.dropout(module.to_out(out))  # type: ignore[no-any-return]


def _without_weights(module: Any, *given: Any, output_attentions: bool = False, **named: Any) -> Any:
    if output_attentions:
        raise ValueError(f"output_attentions: expected False for {module.config.model_type} in use_ringtile, got True")
    return type(module).forward(module, *given, **named)


def _by_slopes(slopes: Tensor, mask: Tensor | None) -> Callable[..., Any]:
    # Models that write their attention by hand get their own causal mask, or none.
    if not isinstance(mask, PatternMask):
        raise ValueError("attention_mask: expected one of the tokens [B, N], got another")
    return lambda query, key, start: {"alibi_slopes": slopes}


def _attend_bloom(
    module: Any,
    hidden_states: Tensor,
    residual: Tensor,
    alibi: Tensor,
    attention_mask: Any,
    layer_past: Any = None,
    output_attentions: bool = False,
    **options: Any,
) -> _Result:
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor, dropout_add

    refuse_arguments(options)
    if module.pretraining_tp > 1 and module.slow_but_exact:
        raise ValueError(f"slow_but_exact: expected False, got True with {module.pretraining_tp=}")
    query, key, value = module._reshape(module.query_key_value(hidden_states))
    if layer_past is not None:
        key, value = layer_past.update(key, value, module.layer_idx)
    slopes = build_alibi_tensor(alibi.new_ones(1, 2), module.num_heads, torch.float32)[:, 0, 1]
    scores, real = _by_slopes(slopes, attention_mask), attention_mask.kept.key_mask
    if real is not None:
        begins_once = ((real[:, 1:] & ~real[:, :-1]).sum(1) + real[:, 0] <= 1).all()
        if torch.compiler.is_compiling():
            message = "attention_mask: torch.compile needs padding before or after the tokens, got some between them"
            assert_async(begins_once, message)
        elif not begins_once:
            # Its positions count real tokens, so tokens on both sides of padding are nearer than their places say.
            numbers = alibi.view(len(key), module.num_heads, -1, 1)
            scores = _biased(ByKey(numbers, alibi.new_full((1, 1, 1), 1 / module.inv_norm_factor), 0))
    heads, dropout = (query, key, value), module.attention_dropout.p
    asked = {"output_attentions": output_attentions}
    out, weights = _attend(module, heads, attention_mask, module.inv_norm_factor, dropout, scores, asked)
    return dropout_add(module.dense(out), residual, module.hidden_dropout, module.training), weights


def _attend_mpt(
    module: Any,
    hidden_states: Tensor,
    position_bias: Tensor,
    attention_mask: Any = None,
    **options: Any,
) -> tuple[Tensor, None]:
    refuse_arguments(options, "cache", "past_key_values")
    mixed = module.Wqkv(hidden_states)
    if module.clip_qkv:
        mixed = mixed.clamp(min=-module.clip_qkv, max=module.clip_qkv)
    query, key, value = (x.unflatten(2, (-1, module.head_dim)).transpose(1, 2) for x in mixed.chunk(3, 2))
    if (cache := cache_of(options)) is not None:
        key, value = cache.update(key, value, module.layer_idx)
    if key.shape[2] > position_bias.shape[2]:
        raise ValueError(f"max_seq_len: expected at least {key.shape[2]} keys, got {position_bias.shape[2]}")
    # The last of them is 0.
    scores = _by_slopes(-position_bias[:, 0, -2], attention_mask)
    heads, scale, dropout = (query, key, value), module.softmax_scale, module.attn_dropout_p
    return module.out_proj(_attend(module, heads, attention_mask, scale, dropout, scores, {})[0]), None


def _mask_deberta(encoder: Any, mask: Tensor) -> Tensor:
    if mask.dim() > 2:
        return type(encoder).get_attention_mask(encoder, mask)  # type: ignore[no-any-return]
    return _mask(mask, mask)


def _positions_deberta(encoder: Any, hidden_states: Tensor, query_states: Any = None, relative_pos: Any = None) -> None:
    if query_states is not None or relative_pos is not None:
        raise ValueError("query_states, relative_pos: expected None with ringtile")


@constant
def _scale_deberta(head_dim: int, kinds: int) -> float:
    # It is rounded to float32 in every dtype.
    return 1 / float(torch.tensor(head_dim * (1 + kinds), dtype=torch.float32, device="cpu").sqrt())


def _attend_deberta(
    module: Any,
    hidden_states: Tensor,
    attention_mask: Tensor,
    output_attentions: bool = False,
    *,
    rel_embeddings: Any = None,
    **options: Any,
) -> _Result:
    from transformers.models.deberta_v2.modeling_deberta_v2 import make_log_bucket_position

    refuse_arguments(options)
    head_dim, tokens = module.attention_head_size, hidden_states.shape[1]
    query, key, value = heads_of(hidden_states, head_dim, module.query_proj, module.key_proj, module.value_proj)
    kinds = [kind for kind in ("c2p", "p2c") if kind in module.pos_att_type]
    biases: list[Bias] = []
    if module.relative_attention:
        span, distance = module.pos_ebd_size, torch.arange(tokens - 1, -tokens, -1, device=query.device)
        if module.position_buckets > 0:
            distance = make_log_bucket_position(distance, module.position_buckets, module.max_relative_positions)
        place, vectors = (distance.long() + span).clamp(0, 2 * span - 1), module.pos_dropout(rel_embeddings)[: 2 * span]
        for kind, side, of in (("c2p", "key", query), ("p2c", "query", key)):
            if kind in kinds:
                project = getattr(module, f"{side}_proj" if module.share_att_key else f"pos_{side}_proj")
                table = heads_of(vectors, head_dim, project)[0].index_select(1, place)
                biases.append((ByQuery if kind == "c2p" else ByKey)(of, table, tokens - 1))
    scores, scale = _biased(tuple(biases)) if biases else None, _scale_deberta(head_dim, len(kinds))
    asked, dropout = {"output_attentions": output_attentions}, module.dropout.p
    return _attend(module, (query, key, value), attention_mask, scale, dropout, scores, asked)


def _attend_wavlm(module: Any, hidden_states: Tensor, attention_mask: Any, position_bias: Any, **options: Any) -> Any:
    # Layers share the weight of the first one.
    weight = module.rel_attn_embed.weight if position_bias is None else position_bias
    query, key, value = heads_of(hidden_states, module.head_dim, module.q_proj, module.k_proj, module.v_proj)
    states = hidden_states.unflatten(-1, (module.num_heads, -1)).transpose(1, 2)
    first, second = module.gru_rel_pos_linear(states).unflatten(-1, (2, 4)).sum(-1).sigmoid().chunk(2, -1)
    gate, n = first * (second * module.gru_rel_pos_const - 1) + 2, query.shape[2]
    of = Relative.t5(weight, n, n, bidirectional=True, max_distance=module.max_distance)
    # A gate multiplies the numbers of a query, as vectors of one number do.
    scores = _biased(ByQuery(gate / module.scaling, of.table.unsqueeze(-1), of.offset))
    mask = _mask(attention_mask, hidden_states)
    out, weights = _attend(module, (query, key, value), mask, module.scaling, module.dropout, scores, options)
    # transformers returns the mean of the heads for each.
    weights = None if weights is None else weights.mean(1, keepdim=True).expand_as(weights)
    return module.out_proj(out), weights, weight


def _bias_mpnet(encoder: Any, x: Tensor, *given: Any) -> Callable[..., Any]:
    n = x.shape[1]
    # 32 buckets, whatever the config says.
    return _biased(Relative.t5(encoder.relative_attention_bias.weight[:32], n, n, bidirectional=True))


def _attend_mpnet(module: Any, x: Tensor, mask: Tensor, scores: Any, output_attentions: bool = False) -> _Result:
    options = {"output_attentions": output_attentions, "is_causal": False}
    heads = heads_of(x, module.attention_head_size, module.q, module.k, module.v)
    scale, dropout = module.attention_head_size**-0.5, module.dropout.p
    out, weights = _attend(module, heads, mask, scale, dropout, scores, options)
    return module.o(out), weights


def _attend_swin(module: Any, x: Tensor, mask: Any = None, output_attentions: bool = False, **options: Any) -> Any:
    """Return the output of the attention of Swin, of its second version, or of their copies."""
    is_new, is_cosine = hasattr(module, "o_proj"), hasattr(module, "logit_scale")
    owner = module.relative_position_bias if is_new else module
    names = ("q_proj", "k_proj", "v_proj") if is_new else ("query", "key", "value")
    head_dim = x.shape[-1] // module.num_attention_heads
    query, key, value = heads_of(x, head_dim, *(getattr(module, name) for name in names))
    if is_cosine:
        table = 16 * module.continuous_position_bias_mlp(module.relative_coords_table).sigmoid().flatten(0, -2)
        length = module.logit_scale.clamp(max=math.log(100)).exp()
        query, key, scale = length * normalize(query, dim=-1), normalize(key, dim=-1), 1.0
    else:
        table, scale = owner.relative_position_bias_table, head_dim**-0.5
    # They count offsets from the key to the query.
    sizes = [2 * size - 1 for size in owner.window_size]
    bias = Grid(table.flip(0).T.reshape(-1, *sizes), owner.window_size)
    if mask is not None:
        mask = from_mask((mask == 0).repeat(len(query) // len(mask), 1, 1).unsqueeze(1))
    mask = _mask(None, x, mask)
    options["output_attentions"] = output_attentions
    dropout = module.attention_dropout if is_new else module.dropout.p
    out, weights = _attend(module, (query, key, value), mask, scale, dropout, _biased(bias), options)
    return (module.o_proj(out), weights) if is_new else (out, weights)


_T5 = "T5 MT5 UMT5 LongT5 SwitchTransformers Pop2Piano Pix2StructText".split()
_WAV2VEC2 = "Wav2Vec2Conformer", "Wav2Vec2Bert", "SeamlessM4TConformer", "SeamlessM4Tv2Conformer"
_SWIN = "Swin", "Swinv2Self", "Swin2SRSelf", "DonutSwinSelf", "ClapAudioSelf"
_REPLACED: dict[str, dict[str, Callable[..., Any]]] = {
    **{f"{family}Attention": {"compute_bias": _by_distance} for family in _T5},
    **{f"{family}SelfAttention": {"forward": _attend_wav2vec2} for family in _WAV2VEC2},
    "ParakeetEncoder": {"_get_output_attention_mask": _frames},
    "ParakeetEncoderAttention": {"forward": _attend_parakeet},
    "LasrEncoderConvolutionModule": {"forward": _convolve_lasr},
    "GraniteSpeech5EncoderAttention": {"forward": _attend_granite5},
    "GraniteSpeechConformerAttention": {"forward": _attend_granite},
    "GraniteSpeechPlusConformerAttention": {"forward": _attend_granite},
    "WavLMAttention": {"forward": _attend_wavlm},
    "MPNetEncoder": {"compute_position_bias": _bias_mpnet},
    "MPNetSelfAttention": {"forward": _attend_mpnet},
    **{f"{family}Attention": {"forward": _attend_swin} for family in _SWIN},
    "MptBlock": {"forward": _without_weights},
    "BloomAttention": {"forward": _attend_bloom},
    "MptAttention": {"forward": _attend_mpt},
    "DebertaV2Encoder": {"get_attention_mask": _mask_deberta, "get_rel_pos": _positions_deberta},
    "DisentangledSelfAttention": {"forward": _attend_deberta},
}
_TOGETHER = (
    ("MPNetEncoder", "MPNetSelfAttention"),
    ("ParakeetEncoder", "ParakeetEncoderAttention"),
    ("DebertaV2Encoder", "DisentangledSelfAttention"),
)
"""Classes of which the first hands the second what only its replacement reads."""
_BY_HAND = set("bloom mpt granite_speech granite_speech_plus deberta_v2 wavlm mpnet swinv2 swin2sr donut".split())
"""Files of models whose attention is written by hand, and replaced here."""


def is_replaced(kind: type) -> bool:
    """Return True if models of this class write their attention by hand, and `replace_biases` replaces it."""
    return kind.__module__.startswith("transformers.models.") and kind.__module__.split(".")[2] in _BY_HAND


def replace_biases(model: nn.Module) -> None:
    """Have the modules of a model that compute a bias hand it over, in place. They keep their weights."""
    classes = {type(module).__name__ for module in model.modules()}
    for pair in _TOGETHER:
        if len(missing := set(pair) - classes) == 1:
            raise ValueError(f"model: expected modules of {' and '.join(pair)}, got no {missing.pop()}")
    replace_methods(model, _REPLACED)
    for module in model.modules():
        if "compute_bias" in module.__dict__:
            # Otherwise the others make zeros for all pairs.
            module.__dict__["has_relative_attention_bias"] = True
