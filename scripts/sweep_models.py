"""Small models of random weights of any class of transformers, what they read and what they compute, for `sweep.py`."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

Outputs = dict[str, Tensor]
TOKENS, PADDING = 26, 7
SIZES = (
    (r"hidden_act.*|.*_token_id|.*_token_index|pretraining_tp|type_vocab_size|cross_attn_k|codebook_.*", None),
    (r"(.*_)?vocab_size(_.*)?|n_vocab|encoder_hash_byte_group_vocab|ngram_vocab_size_base", 97),
    (r"max_(position_embeddings|seq_len|target_positions)|n_positions|n_ctx|model_max_length", 256),
    (r"max_source_positions", 64),
    (r"(sliding|local)_(window|attention)(_size)?|attention_(window|chunk)_size|.*sliding_window|window_size", 9),
    (r"mamba_d_state|ssm_state_size|state_size|chunk_size|mamba_chunk_size", 8),
    (r"mamba_(n|num)_heads|n_mamba_heads", 8),
    (r"qk_rope_head_dim|rotary_dim|qk_nope_head_dim", 8),
    (r"mamba_d_head|mamba_headdim|qk_head_dim", 16),
    (r"(.*_)?(head_dim|dim_head|d_head|attention_head_size|kv_channels|d_kv)", 16),
    (r"(.*_)?(q_lora_rank|o_lora_rank|hc_lowrank)", 32),
    (r"(.*_)?kv_lora_rank|mamba_dt_rank|adapter_rank", 16),
    (r"(.*_)?(num_(key_value|kv)_heads|num_query_groups|kv_n_heads)|linear_num_key_heads", 2),
    (r"(.*_)?(num_attention_heads|num_heads|n_heads?|attention_heads|linear_num_value_heads|linear_num_heads)", 4),
    (r"(.*_)?(intermediate_size|ffn_dim|ffn_hidden_size|feed_forward_size|d_inner|n_inner|mlp_dim)", 96),
    (r"(.*_)?(d_ff|dff|dim_ff)|intermediate_size_mlp", 96),
    (r"(.*_)?(hidden_size|d_model|n_embd|embed_dim|emb_dim|embedding_size|embedding_dim|hidden_dim|lru_width)", 64),
    (r"hidden_size_global|projection_dim", 64),
    (r"num_experts_per_tok(en)?|(moe_)?top_?k|moe_k|top_k_experts|num_selected_experts", 2),
    (r"n_group|topk_group|num_expert_groups?|n_groups|mamba_n_?groups|num_limited_groups", 1),
    (r"num_experts|n_routed_experts|num_local_experts|moe_num_experts|zero_expert_num|n_shared_experts", 4),
    (r"(num_|n_)?(first_k_dense_replace|num_dense_layers)", 1),
    (r"index_topk|keep_window_size", 12),
    (r"index_n_heads", 3),
    (r"index_block_size", 8),
    (r"index_topk_blocks", 3),
    (r"(.*_)?(num_hidden_layers|num_layers|n_layers?|encoder_layers|decoder_layers|depth|num_blocks)", 2),
    (r"image_size|base_channels", 32),
    (r"patch_size", 8),
    (r"num_mel_bins|feature_projection_input_dim|input_feat_per_channel", 16),
)
"""Fields of configurations, and the values of small ones. None is to be left."""
UNSET = "vocab_size head_dim num_key_value_heads num_experts_per_tok n_routed_experts n_shared_experts".split()
"""Fields that some models need and some of their configurations leave out."""
_ZAMBA = dict(
    **dict(attention_hidden_size=128, attention_head_dim=32, num_hidden_layers=4),
    layers_block_type=["linear_attention", "hybrid"] * 2,
)
SPECIAL: dict[str, dict[str, Any]] = {
    "apertus1p5": dict(image_token_offset=50, audio_token_offset=66),
    "apertus1p5_vision_tokenizer": dict(codebook_size=16),
    "bamba": dict(attn_layer_indices=[1]),
    "blt": dict(patch_in_forward=False),
    "blip-2": dict(image_token_index=95),
    "chameleon": dict(vocabulary_map={"<image>": 95}),
    "cohere_compass_text": dict(rope_parameters={"full_attention": {"rope_type": "default", "rope_theta": 1e4}}),
    "dbrx": dict(attn_config=dict(kv_n_heads=2, rope_theta=1e4, clip_qkv=8.0)),
    "dory": dict(n_input_layers=1, n_recurrent_layers=1, n_output_layers=1, num_hidden_layers=3, layer_types=None),
    "emu3": dict(vocabulary_map={"<image>": 95}),
    "falcon_h1": dict(mamba_d_ssm=128, mamba_d_head=16),
    "glm5_next_text": dict(index_kpool=4),
    "gemma3n_text": dict(num_kv_shared_layers=0),
    "granitemoehybrid": dict(layer_types=["mamba", "attention"]),
    "instructblip": dict(image_token_index=95),
    "jamba": dict(attn_layer_period=2, attn_layer_offset=1),
    "lfm2_moe": dict(layer_types=["conv", "full_attention"]),
    "mamba2": dict(num_heads=8),
    "qwen4_exp_text": dict(
        **dict(indexer_n_heads=2, indexer_kv_heads=1, indexer_head_dim=16, indexer_budget=12),
        **dict(indexer_compress_ratio=4, layer_types=["linear_attention", "indexed_attention"]),
    ),
    "moonshine": dict(encoder_num_key_value_heads=4, decoder_num_key_value_heads=4),
    "qwen2_5_omni_thinker": dict(vision_start_token_id=93),
    "qwen3_omni_moe_thinker": dict(vision_start_token_id=93),
    "recurrent_gemma": dict(num_hidden_layers=3),
    "reformer": dict(axial_pos_shape=[16, 16], axial_pos_embds_dim=[32, 32]),
    "sam3_lite_text_text_model": dict(num_hidden_layers=3),
    "wavtokenizer": dict(codebook_dim=64),
    "wavtokenizer_encoder": dict(codebook_dim=64, codebook_size=16),
    "xmod": dict(default_language="en_XX"),
    "zamba": _ZAMBA,
    "zamba2": _ZAMBA,
}
"""What the small configuration of a kind needs besides."""
AXES = re.compile("glm|qwen2.*(vl|omni)|paddleocr|ernie4_5_vl")
"""Kinds whose positions have sections of time, height and width, which their configurations may leave out."""


def with_sections(rope: dict[str, Any], fields: dict[str, Any], always: bool) -> dict[str, Any]:
    """The parameters of rotary positions, with sections of time, height and width that fit a small head."""
    if any(isinstance(x, dict) for x in rope.values()):
        return {key: with_sections(x, fields, always) if isinstance(x, dict) else x for key, x in rope.items()}
    if "mrope_section" not in rope and not always:
        return rope
    head = fields.get("qk_rope_head_dim") or fields.get("head_dim") or 16
    half = int(head * rope.get("partial_rotary_factor", 1.0)) // 2
    return rope | {"mrope_section": [half - half // 4 * 2, half // 4, half // 4]}


def small(config: Any) -> dict[str, Any]:
    """The fields of a configuration like another one, with few and small layers, that differ."""
    fields: dict[str, Any] = {}
    values = {name: value for name, value in vars(config).items() if not name.startswith("_")}
    layers = next((values[n] for n in ("num_hidden_layers", "n_layer", "num_layers") if type(values.get(n)) is int), 0)
    per_layer = {n: v for n, v in values.items() if isinstance(v, list | tuple) and 1 < len(v) == layers}
    # One layer of each sort, in their order, and two at least.
    sorts = list(zip(*(map(str, v) for v in per_layer.values()), strict=True)) or [()] * layers
    firsts = sorted({sort: at for at, sort in reversed(list(enumerate(sorts)))}.values())[:6]
    picks = firsts if len(firsts) > 1 else list(range(min(layers, 2)))
    for name, value in values.items():
        size = next((size for words, size in SIZES if re.fullmatch(words, name)), None)
        if name in (*("window_size",) * ("patch_size" in values), *("embed_dim", "num_heads") * ("depths" in values)):
            # Windows of pictures, and the widths of their stages, depend on one another.
            continue
        if isinstance(value, PreTrainedConfig):
            fields[name] = value.to_dict() | small(value)
            fields[name].pop("per_layer_config", None)
        elif name in per_layer:
            fields[name] = [min(size, value[at]) if size and type(value[at]) is int else value[at] for at in picks]
        elif value is None and name in UNSET:
            fields[name] = 4 if name == "num_key_value_heads" else size
        elif type(value) is int and value > 1 and size is not None:
            is_depth = size == 2 and value == layers and ("layer" in name or name == "num_blocks")
            fields[name] = len(picks) if is_depth else min(size, value)
    heads = next((n for n in ("num_attention_heads", "n_head", "n_heads") if n in fields), None)
    if heads and "num_key_value_heads" in fields and values["num_key_value_heads"] == values[heads]:
        fields["num_key_value_heads"] = fields[heads]
    if "qk_rope_head_dim" in fields and values.get("head_dim") == values["qk_rope_head_dim"]:
        fields["head_dim"] = fields["qk_rope_head_dim"]
    top = fields.get("vocab_size", values.get("vocab_size")) or 97
    for name, value in values.items():
        if re.fullmatch(r".*(token_id|token_index)", name) and type(value) is int and not 0 <= value < top:
            fields[name] = {"bos_token_id": 1, "eos_token_id": 2}.get(name, top - 1 - len(name) % 7)
    # Tied to its table, a model of random weights repeats its last token.
    fields |= {name: x for name, x in dict(pad_token_id=0, tie_word_embeddings=False).items() if name in values}
    if isinstance(rope := values.get("rope_parameters"), dict):
        fields["rope_parameters"] = with_sections(rope, fields, bool(AXES.search(config.model_type)))
    return fields | SPECIAL.get(config.model_type, {})


def config_of(kind: str, made: Any, is_decoder: bool) -> Any:
    """The small configuration of a class. That of texts, if a kind has several and the class has one."""
    config, own = CONFIG_MAPPING[kind](), getattr(made, "config_class", None)
    if own is not None and not isinstance(config, own):
        text = config.get_text_config(decoder=True)
        config = type(text)() if isinstance(text, own) else config
    more = {"is_decoder": True} if is_decoder and hasattr(config, "is_decoder") else {}
    return type(config)(**(small(config) | more))


def build(made: Any, config: Any) -> Any:
    """A model with eager attention, and random weights that are large enough for each of them to matter."""
    torch.manual_seed(0)
    config._attn_implementation = "eager"
    model = made(config).float().eval()
    with torch.no_grad():
        for name, x in model.named_parameters():
            if x.dim() > 1 and x.numel() and x.is_floating_point():
                x.normal_(0, 0.3 if "embed" in name else x[0].numel() ** -0.5)
            elif x.is_floating_point():
                x.add_(torch.randn_like(x), alpha=0.1)
    if getattr(model, "generation_config", None) is not None:
        for name in ("eos_token_id", "forced_eos_token_id", "suppress_tokens", "begin_suppress_tokens"):
            setattr(model.generation_config, name, None)
        model.generation_config.pad_token_id = 0
        model.generation_config.decoder_start_token_id = 1
    return model


def padding(side: str | None, n_tokens: int = TOKENS) -> Tensor:
    """A mask of two rows, the second of which has padding on a side."""
    mask = torch.ones(2, n_tokens, dtype=torch.long)
    if side is not None:
        mask[1, slice(n_tokens - PADDING, None) if side == "right" else slice(0, PADDING)] = 0
    return mask


def texts(model: Any, side: str | None) -> dict[str, Tensor]:
    """Two rows of tokens, the second of which has padding on a side."""
    torch.manual_seed(1)
    config, mask = model.config, padding(side)
    top = getattr(config.get_text_config(decoder=True), "vocab_size", None) or 97
    rows = torch.randint(4, max(min(top, 97) - 12, 5), (2, TOKENS)) * mask
    # Musicgen reads a row per codebook.
    ids = rows.repeat_interleave(config.num_codebooks, 0) if "musicgen" in config.model_type else rows
    return {"input_ids": ids, "attention_mask": mask}


def inputs(model: Any, side: str | None, mode: str = "main") -> dict[str, Tensor]:
    """The arguments of a model that reads texts, pictures, spectra or samples: its main one, or all that it knows.

    In the mode "channel", samples and spectra have their channels first.
    """
    accepts, config, name = inspect.signature(model.forward).parameters, model.config, model.main_input_name
    configs = [config, *(x for x in vars(config).values() if isinstance(x, PreTrainedConfig))]

    def size(*fields: str, otherwise: int) -> int:
        sizes = (getattr(each, field, None) for field in fields for each in configs)
        return next((x if type(x) is int else x[0] for x in sizes if type(x) in (int, list, tuple) and x), otherwise)

    tokens, mels = texts(model, side), size("num_mel_bins", "feature_projection_input_dim", "input_dim", otherwise=16)
    side_length, channels = size("image_size", otherwise=32), size("num_channels", "in_channels", otherwise=3)
    patches = 16, channels * size("temporal_patch_size", otherwise=1) * size("patch_size", otherwise=8) ** 2
    width, grid = size("hidden_size", "d_model", otherwise=64), torch.tensor([[1, 4, 4]])
    made: dict[str, Callable[[], Tensor]] = {
        "pixel_values": lambda: torch.randn(2, channels, side_length, side_length),
        "input_features": lambda: torch.randn(2, *((mels, 64) if mode == "channel" else (64, mels))),
        "input_values": lambda: torch.randn(2, *(1,) * (mode == "channel"), 4000),
        "inputs_embeds": lambda: torch.randn(2, TOKENS, width),
        "encoder_hidden_states": lambda: torch.randn(2, 9, width),
        "bbox": lambda: torch.tensor([1, 2, 9, 8]).expand(2, TOKENS, 4),
        "qformer_input_ids": lambda: tokens["input_ids"],
        "decoder_input_ids": lambda: tokens["input_ids"][:, -11:],
    }
    if config.model_type in ("whisper", "qwen2_audio_encoder"):
        made["input_features"] = lambda: torch.randn(2, mels, 2 * config.max_source_positions)
    if ("grid_thw" in accepts or "image_grid_thw" in accepts) and "input_ids" not in accepts:
        # Patches of one picture, in rows.
        made = dict.fromkeys(("hidden_states", "pixel_values"), lambda: torch.randn(patches))
        made |= dict.fromkeys(("grid_thw", "image_grid_thw"), lambda: grid)
        wanted = [*(key for key in made if key in accepts)]
    elif mode != "main":
        wanted = [key for key in made if key in accepts and not ("input_ids" in accepts and key == "inputs_embeds")]
    else:
        wanted = [name] if name != "input_ids" or "input_ids" not in accepts else []
        wanted += ["decoder_input_ids"] if config.is_encoder_decoder and "decoder_input_ids" in accepts else []
    found = {key: x for key, x in tokens.items() if key in accepts and "input_ids" in accepts}
    for key in wanted:
        if key not in made:
            raise NotImplementedError(f"inputs: {key}")
        torch.manual_seed(1)
        found[key] = made[key]()
        if side is not None and key in ("inputs_embeds", "input_features") and "attention_mask" in accepts:
            found.setdefault("attention_mask", padding(side, found[key].shape[1]))
    return found


def flat(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """The floating point tensors in the outputs of a model."""
    # Some layers return the weights of eager attention, whether they are asked or not.
    if isinstance(value, Tensor):
        if value.is_floating_point() and "attentions" not in name:
            yield name, value
    elif isinstance(value, dict):
        for key, part in value.items():
            yield from flat(part, f"{name}.{key}")
    elif isinstance(value, list | tuple):
        for at, part in enumerate(value):
            yield from flat(part, f"{name}[{at}]")


def forward(model: Any, given: dict[str, Any], gradients: bool = False) -> Outputs:
    """The outputs of a model where tokens are real, or the gradients of all its parameters."""
    torch.manual_seed(2)
    more = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
    with torch.set_grad_enabled(gradients):
        out = dict(flat(dict(model(**given, **more, return_dict=True))))
    mask = given.get("attention_mask")
    if mask is not None:
        real = mask.bool()
        rows = {key: real.repeat_interleave(len(x) // 2, 0) if x.dim() > 1 else real for key, x in out.items()}
        out = {key: x[rows[key]] if x.shape[:2] == rows[key].shape else x for key, x in out.items()}
    if not gradients:
        return {key: x.detach() for key, x in out.items()}
    torch.manual_seed(3)
    loss = sum((x * torch.randn_like(x)).sum() for x in out.values() if x.requires_grad)
    named = [(name, x) for name, x in model.named_parameters() if x.requires_grad]
    found = torch.autograd.grad(loss, [x for _, x in named], allow_unused=True)
    return {name: g for (name, _), g in zip(named, found, strict=True) if g is not None}


def generated(model: Any, given: dict[str, Any], **options: Any) -> Outputs:
    """The tokens of generation through a cache, and the logits of its steps, or the scores of its beams."""
    torch.manual_seed(2)
    given = {key: x for key, x in given.items() if not key.startswith("decoder")}
    options = dict(max_new_tokens=7, do_sample=False, use_cache=True) | options
    more = dict(return_dict_in_generate=True, output_logits=True, output_scores=True)
    out = model.generate(**given, **options, **more)
    # Beams whose scores are equal but for rounding may change their order.
    numbers = torch.stack(out.logits) if "num_beams" not in options else out.sequences_scores
    return {"tokens": out.sequences.double(), "numbers": numbers}


def in_chunks(model: Any, given: dict[str, Any]) -> Outputs:
    """The logits of a text that is read in two parts, the second with a cache of the first."""
    ids, mask, cut = given["input_ids"], given["attention_mask"], TOKENS // 2 + 3
    name = next(x for x in ("cache", "past_key_values") if x in inspect.signature(model.forward).parameters)
    with torch.no_grad():
        first = model(input_ids=ids[:, :cut], attention_mask=mask[:, :cut], use_cache=True)
        second = model(input_ids=ids[:, cut:], attention_mask=mask, use_cache=True, **{name: first[name]})
    return {"logits": second[0]}
