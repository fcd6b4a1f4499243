"""Models of transformers that are small enough to compute in milliseconds. The first of them loads transformers."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

os.environ["HF_HUB_OFFLINE"] = "1"


class Doubled(TorchFunctionMode):
    """Has models compute in float64 what they compute in float32 whatever their dtype: norms, softmax and scores."""

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        swapped = {name: torch.float64 if x is torch.float32 else x for name, x in (kwargs or {}).items()}
        func = torch.Tensor.double if func is torch.Tensor.float else func
        return func(*(torch.float64 if x is torch.float32 else x for x in args), **swapped)


class Lazily:
    """A module that is loaded when one of its names is read, so that to collect tests costs no import."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self.__name__), name)


hf: Any = Lazily("transformers")
masking_utils: Any = Lazily("transformers.masking_utils")

DECODER = dict(
    vocab_size=97,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=512,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=None,
)
ENCODER = {name: value for name, value in DECODER.items() if name not in ("num_key_value_heads", "head_dim")}
MIXED = dict(DECODER, sliding_window=20, layer_types=["sliding_attention", "full_attention"])
EXPERTS = dict(num_local_experts=4, num_experts_per_tok=2)

SHARED = dict(
    **(MIXED | {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}),
    **dict(num_kv_shared_layers=2, global_head_dim=32, vocab_size_per_layer_input=97, hidden_size_per_layer_input=8),
)
STARCODER = {name: value for name, value in DECODER.items() if name != "head_dim"} | {"sliding_window": 20}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
VISION = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4)
PICTURES = dict(VISION, image_size=32, patch_size=8)
LATENT = dict(
    **dict(kv_lora_rank=16, q_lora_rank=32, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=16),
    **dict(n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, topk_method="greedy"),
)

MODELS: dict[str, Callable[[], tuple[type, Any]]] = {
    "Llama": lambda: (hf.LlamaForCausalLM, hf.LlamaConfig(**DECODER)),
    "Mistral": lambda: (hf.MistralForCausalLM, hf.MistralConfig(**DECODER, sliding_window=20)),
    "Qwen3": lambda: (hf.Qwen3ForCausalLM, hf.Qwen3Config(**DECODER)),
    "Gemma2": lambda: (hf.Gemma2ForCausalLM, hf.Gemma2Config(**MIXED, query_pre_attn_scalar=16)),
    "Gemma3": lambda: (hf.Gemma3ForCausalLM, hf.Gemma3TextConfig(**MIXED)),
    "gpt-oss": lambda: (hf.GptOssForCausalLM, hf.GptOssConfig(**MIXED, **EXPERTS, rope_parameters=ROPE)),
    "Mixtral": lambda: (hf.MixtralForCausalLM, hf.MixtralConfig(**DECODER, **EXPERTS)),
    "Llama 4": lambda: (
        hf.Llama4ForCausalLM,
        hf.Llama4TextConfig(
            **DECODER,
            attention_chunk_size=24,
            intermediate_size_mlp=96,
            num_local_experts=2,
            layer_types=["chunked_attention", "full_attention"],
        ),
    ),
    "Gemma 4": lambda: (hf.Gemma4ForCausalLM, hf.Gemma4TextConfig(**SHARED)),
    "Phi-3": lambda: (hf.Phi3ForCausalLM, hf.Phi3Config(**DECODER, sliding_window=20)),
    "Starcoder2": lambda: (hf.Starcoder2ForCausalLM, hf.Starcoder2Config(**STARCODER)),
    "DeepSeek-V2": lambda: (hf.DeepseekV2ForCausalLM, hf.DeepseekV2Config(**ENCODER, **LATENT)),
    "GPT-2": lambda: (
        hf.GPT2LMHeadModel,
        hf.GPT2Config(vocab_size=97, n_embd=64, n_layer=2, n_head=4, n_positions=512, pad_token_id=0, bos_token_id=1),
    ),
    "BERT": lambda: (hf.BertForMaskedLM, hf.BertConfig(**ENCODER)),
    "RoBERTa": lambda: (hf.RobertaForMaskedLM, hf.RobertaConfig(**ENCODER)),
    "ModernBERT": lambda: (
        hf.ModernBertForMaskedLM,
        hf.ModernBertConfig(
            **dict(ENCODER, num_hidden_layers=4), local_attention=16, global_attn_every_n_layers=2, cls_token_id=1
        ),
    ),
    "Gemma3 with images": lambda: (
        hf.Gemma3ForConditionalGeneration,
        hf.Gemma3Config(
            vision_config=hf.SiglipVisionConfig(**PICTURES),
            text_config=hf.Gemma3TextConfig(**MIXED),
            **dict(image_token_id=95, mm_tokens_per_image=16, boi_token_index=94, eoi_token_index=93),
        ),
    ),
    "LLaVA": lambda: (
        hf.LlavaForConditionalGeneration,
        hf.LlavaConfig(
            vision_config=hf.CLIPVisionConfig(**PICTURES),
            text_config=hf.LlamaConfig(**DECODER),
            **dict(image_token_index=95, image_seq_length=16),
        ),
    ),
    "Whisper": lambda: (
        hf.WhisperForConditionalGeneration,
        hf.WhisperConfig(
            **dict.fromkeys(("encoder_layers", "decoder_layers"), 2),
            **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
            **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 96),
            **dict(vocab_size=97, d_model=64, num_mel_bins=16, max_source_positions=50, max_target_positions=100),
            **dict(pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1),
        ),
    ),
    "ViT": lambda: (
        hf.ViTModel,
        hf.ViTConfig(**VISION, image_size=32, patch_size=4),
    ),
    "BART": lambda: (
        hf.BartForConditionalGeneration,
        hf.BartConfig(
            **dict.fromkeys(("encoder_layers", "decoder_layers"), 2),
            **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
            **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 96),
            **dict(vocab_size=97, d_model=64, max_position_embeddings=128, pad_token_id=0, bos_token_id=1),
            **dict(eos_token_id=2, forced_eos_token_id=None, decoder_start_token_id=2),
        ),
    ),
}

_PAIR = dict(MIXED, query_pre_attn_scalar=16)
JOINED: dict[str, Callable[[], tuple[type, Any]]] = {
    "T5Gemma": lambda: (
        hf.T5GemmaForConditionalGeneration,
        hf.T5GemmaConfig(
            encoder=hf.T5GemmaModuleConfig(**_PAIR),
            decoder=hf.T5GemmaModuleConfig(**_PAIR, is_decoder=True),
            **dict(vocab_size=97, dropout_rate=0.0),
        ),
    ),
    "T5Gemma2": lambda: (
        hf.T5Gemma2ForConditionalGeneration,
        hf.T5Gemma2Config(
            encoder=hf.T5Gemma2EncoderConfig(
                text_config=_PAIR,
                vision_config=hf.SiglipVisionConfig(**PICTURES),
                **dict(image_token_index=95, mm_tokens_per_image=16, boi_token_index=94, eoi_token_index=93),
            ),
            decoder=hf.T5Gemma2DecoderConfig(**_PAIR),
            **dict(image_token_index=95, vocab_size=97, dropout_rate=0.0, attention_dropout=0.0),
        ),
    ),
}
"""Encoders and decoders of Gemma. The second joins the keys of both in one softmax."""

_SPARSE = dict(
    **(ENCODER | {"num_key_value_heads": 4, "num_hidden_layers": 3, "intermediate_size": 48}),
    **dict(kv_lora_rank=16, q_lora_rank=32, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=16),
    **dict(index_topk=12, index_n_heads=3, index_head_dim=16, n_routed_experts=4, num_experts_per_tok=2),
    **dict(moe_intermediate_size=32, mlp_layer_types=["dense", "sparse", "sparse"], tie_word_embeddings=False),
)
_ONE_GROUP = dict(n_group=1, topk_group=1)
_SHARED_CHOICE = dict(indexer_types=["full", "shared", "full"])

SPARSE: dict[str, Callable[[], tuple[type, Any]]] = {
    "deepseek_v32": lambda: (hf.DeepseekV32ForCausalLM, hf.DeepseekV32Config(**_SPARSE, **_ONE_GROUP)),
    "axk2": lambda: (hf.AXK2ForCausalLM, hf.AXK2Config(**_SPARSE, **_ONE_GROUP, head_dim=8, gated_norm_rank=8)),
    "glm_moe_dsa": lambda: (
        hf.GlmMoeDsaForCausalLM,
        hf.GlmMoeDsaConfig(**_SPARSE, **_ONE_GROUP, **_SHARED_CHOICE),
    ),
    "mistral_large4": lambda: (
        hf.MistralLarge4ForConditionalGeneration,
        hf.MistralLarge4Config(
            text_config=hf.MistralLarge4TextConfig(
                **{name: value for name, value in _SPARSE.items() if name != "q_lora_rank"},
                **_ONE_GROUP,
                **_SHARED_CHOICE,
                head_dim=8,
            ),
            vision_config=hf.PixtralVisionConfig(**PICTURES),
        ),
    ),
    "hy_v4": lambda: (hf.HYV4ForCausalLM, hf.HYV4Config(**_SPARSE, **_SHARED_CHOICE)),
    "dots3_note": lambda: (
        hf.Dots3NoteForCausalLM,
        hf.Dots3NoteTextConfig(
            **_SPARSE,
            **_ONE_GROUP,
            **dict(swa_num_attention_heads=4, swa_num_key_value_heads=4, swa_q_lora_rank=32, swa_kv_lora_rank=16),
            **dict(swa_head_dim=16, swa_qk_nope_head_dim=8, swa_v_head_dim=16, sliding_window=20),
            layer_types=["sliding_attention", "indexed_attention", "full_attention"],
        ),
    ),
    "minimax_m3_vl": lambda: (
        hf.MiniMaxM3VLForCausalLM,
        hf.MiniMaxM3VLTextConfig(
            **dict(DECODER, num_hidden_layers=3, num_local_experts=4, num_experts_per_tok=2),
            **dict(dense_intermediate_size=96, shared_intermediate_size=32),
            **dict(index_n_heads=2, index_head_dim=16, index_block_size=8, index_topk_blocks=3, index_local_blocks=1),
            layer_types=["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
        ),
    ),
    "deepseek_v4": lambda: (
        hf.DeepseekV4ForCausalLM,
        hf.DeepseekV4Config(
            **(_SPARSE | dict(num_key_value_heads=1, num_hidden_layers=2, mlp_layer_types=["moe"] * 2, index_topk=4)),
            **dict(head_dim=16, o_lora_rank=16, o_groups=2, sliding_window=10, hc_mult=2, hc_sinkhorn_iters=3),
            compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 16},
            layer_types=["heavily_compressed_attention", "compressed_sparse_attention"],
        ),
    ),
    "glm5_next": lambda: (
        hf.Glm5NextForConditionalGeneration,
        hf.Glm5NextConfig(
            text_config=hf.Glm5NextTextConfig(
                **(_SPARSE | dict(qk_rope_head_dim=0, index_kpool=4)),
                **_ONE_GROUP,
                **dict(linear_head_dim=16, linear_num_heads=4, hc_mult=2, hc_sinkhorn_iters=3),
                layer_types=["linear_attention", "indexed_attention", "indexed_attention"],
                indexer_types=["full", "full", "shared"],
            ),
            vision_config=dict(depth=1, hidden_size=64, intermediate_size=64, num_heads=4, out_hidden_size=64),
        ),
    ),
    "qwen4_exp": lambda: (
        hf.Qwen4ExpForCausalLM,
        hf.Qwen4ExpTextConfig(
            **{name: value for name, value in DECODER.items() if name != "intermediate_size"},
            **dict(linear_key_head_dim=16, linear_value_head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4),
            **dict(moe_intermediate_size=32, shared_expert_intermediate_size=32, num_experts=4, num_experts_per_tok=2),
            **dict(hc_count=2, hc_lowrank=8, indexer_n_heads=2, indexer_kv_heads=1, indexer_head_dim=16),
            **dict(indexer_budget=12, indexer_compress_ratio=4),
            layer_types=["linear_attention", "indexed_attention"],
        ),
    ),
}
"""Models that were trained sparse: each query attends to about 12 tokens, or to 3 blocks of 8."""

_T5 = dict(
    **dict(
        vocab_size=97, d_model=64, d_kv=16, d_ff=96, num_layers=2, num_decoder_layers=2, num_heads=4, dropout_rate=0.0
    ),
    **dict(relative_attention_num_buckets=8, relative_attention_max_distance=20, decoder_start_token_id=0),
)
_CONFORMER = dict(VISION, conv_depthwise_kernel_size=5, layerdrop=0.0, apply_spec_augment=False)
_W2V_BERT = dict(_CONFORMER, feature_projection_input_dim=16)
_PARAKEET = dict(VISION, num_mel_bins=16, subsampling_conv_channels=8, conv_kernel_size=5, layerdrop=0.0, dropout=0.0)
_BLOCKS = dict(num_attention_heads=4, context_size=24, max_position_embeddings=30, conv_kernel_size=5)
_CTC = dict(
    **dict(hidden_dim=64, input_dim=16, num_layers=2, num_heads=4, dim_head=16, feedforward_mult=2),
    **dict(context_size=24, max_pos_emb=30, output_dim=12, conv_kernel_size=5),
)
_SWIN = dict(image_size=22, patch_size=2, embed_dim=16, depths=[2, 2], num_heads=[2, 4], drop_path_rate=0.0)
_WAVES = dict(
    **dict(conv_dim=(16, 16), conv_kernel=(3, 3), conv_stride=(2, 2), num_feat_extract_layers=2),
    **dict(num_conv_pos_embeddings=8, num_conv_pos_embedding_groups=2),
)
_DEBERTA = dict(ENCODER, relative_attention=True, norm_rel_ebd="layer_norm", position_biased_input=False)

BIASED: dict[str, Callable[[], tuple[type, Any]]] = {
    "T5": lambda: (hf.T5ForConditionalGeneration, hf.T5Config(**_T5)),
    "mT5": lambda: (hf.MT5ForConditionalGeneration, hf.MT5Config(**_T5)),
    "UMT5": lambda: (hf.UMT5ForConditionalGeneration, hf.UMT5Config(**_T5)),
    "LongT5": lambda: (hf.LongT5ForConditionalGeneration, hf.LongT5Config(**_T5, local_radius=7)),
    "Switch": lambda: (
        hf.SwitchTransformersForConditionalGeneration,
        hf.SwitchTransformersConfig(**_T5, num_experts=2, num_sparse_encoder_layers=1, num_sparse_decoder_layers=1),
    ),
    "Pop2Piano": lambda: (hf.Pop2PianoForConditionalGeneration, hf.Pop2PianoConfig(**_T5)),
    "wav2vec2-conformer": lambda: (
        hf.Wav2Vec2ConformerModel,
        hf.Wav2Vec2ConformerConfig(
            **_CONFORMER,
            **_WAVES,
            position_embeddings_type="relative",
        ),
    ),
    "w2v-BERT": lambda: (
        hf.Wav2Vec2BertModel,
        hf.Wav2Vec2BertConfig(**_W2V_BERT, left_max_position_embeddings=9, right_max_position_embeddings=4),
    ),
    "w2v-BERT, relative": lambda: (
        hf.Wav2Vec2BertModel,
        hf.Wav2Vec2BertConfig(**_W2V_BERT, position_embeddings_type="relative"),
    ),
    "SeamlessM4T": lambda: (
        importlib.import_module("transformers.models.seamless_m4t.modeling_seamless_m4t").SeamlessM4TSpeechEncoder,
        hf.SeamlessM4TConfig(
            **dict(hidden_size=64, speech_encoder_layers=2, speech_encoder_attention_heads=4, adaptor_kernel_size=2),
            **dict(speech_encoder_intermediate_size=96, feature_projection_input_dim=16, adaptor_stride=2),
            **dict(conv_depthwise_kernel_size=5, speech_encoder_layerdrop=0.0, max_source_positions=100),
        ),
    ),
    "SeamlessM4T v2": lambda: (
        importlib.import_module(
            "transformers.models.seamless_m4t_v2.modeling_seamless_m4t_v2"
        ).SeamlessM4Tv2SpeechEncoder,
        hf.SeamlessM4Tv2Config(
            **dict(hidden_size=64, speech_encoder_layers=2, speech_encoder_attention_heads=4, adaptor_kernel_size=2),
            **dict(speech_encoder_intermediate_size=96, feature_projection_input_dim=16, adaptor_stride=2),
            **dict(conv_depthwise_kernel_size=5, speech_encoder_layerdrop=0.0, speech_encoder_chunk_size=20),
            **dict(left_max_position_embeddings=9, right_max_position_embeddings=4, speech_encoder_left_chunk_num=1),
        ),
    ),
    "WavLM": lambda: (
        hf.WavLMModel,
        hf.WavLMConfig(
            **VISION, **_WAVES, num_buckets=8, max_bucket_distance=20, layerdrop=0.0, apply_spec_augment=False
        ),
    ),
    "Parakeet": lambda: (
        hf.ParakeetForCTC,
        hf.ParakeetCTCConfig(encoder_config=dict(_PARAKEET, subsampling_factor=4), vocab_size=20, pad_token_id=0),
    ),
    "Granite Speech 5": lambda: (
        importlib.import_module("transformers.models.granite_speech5.modeling_granite_speech5").GraniteSpeech5Encoder,
        hf.GraniteSpeech5EncoderConfig(
            **_BLOCKS,
            **dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_key_value_heads=4, head_dim=16),
            **dict(num_mel_bins=4, subsample_layers=[0], vocab_size=20),
        ),
    ),
    "Granite Speech": lambda: (
        importlib.import_module("transformers.models.granite_speech.modeling_granite_speech").GraniteSpeechCTCEncoder,
        hf.GraniteSpeechEncoderConfig(**_CTC),
    ),
    "Granite Speech Plus": lambda: (
        importlib.import_module(
            "transformers.models.granite_speech_plus.modeling_granite_speech_plus"
        ).GraniteSpeechPlusCTCEncoder,
        hf.GraniteSpeechPlusEncoderConfig(**_CTC),
    ),
    "MPNet": lambda: (hf.MPNetForMaskedLM, hf.MPNetConfig(**ENCODER)),
    "DeBERTa-v2": lambda: (
        hf.DebertaV2ForMaskedLM,
        hf.DebertaV2Config(
            **_DEBERTA,
            **dict(pos_att_type=["c2p", "p2c"], share_att_key=True, position_buckets=8, conv_kernel_size=3),
        ),
    ),
    "DeBERTa-v2, apart": lambda: (
        hf.DebertaV2ForMaskedLM,
        hf.DebertaV2Config(**dict(_DEBERTA, max_relative_positions=40), pos_att_type=["p2c", "c2p"]),
    ),
    "Pix2Struct": lambda: (
        hf.Pix2StructTextModel,
        hf.Pix2StructTextConfig(
            **dict(vocab_size=97, hidden_size=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4, is_decoder=True),
            **dict(relative_attention_num_buckets=8, relative_attention_max_distance=20, dropout_rate=0.0),
            initializer_range=0.02,
        ),
    ),
    "BLOOM": lambda: (hf.BloomForCausalLM, hf.BloomConfig(vocab_size=97, hidden_size=64, n_layer=2, n_head=4)),
    "MPT": lambda: (
        hf.MptForCausalLM,
        hf.MptConfig(vocab_size=97, d_model=64, n_heads=4, n_layers=2, max_seq_len=128),
    ),
}
"""Models whose scores have a bias."""

WINDOWED: dict[str, Callable[[], tuple[type, Any]]] = {
    "Swin": lambda: (hf.SwinModel, hf.SwinConfig(**_SWIN, window_size=3)),
    "Swin v2": lambda: (hf.Swinv2Model, hf.Swinv2Config(**_SWIN, window_size=3)),
    "Swin2SR": lambda: (
        hf.Swin2SRForImageSuperResolution,
        hf.Swin2SRConfig(**dict(_SWIN, image_size=12, patch_size=1), window_size=3),
    ),
    "Donut": lambda: (hf.DonutSwinModel, hf.DonutSwinConfig(**_SWIN, window_size=3)),
    "CLAP": lambda: (
        hf.ClapAudioModel,
        hf.ClapAudioConfig(
            **dict(spec_size=32, patch_size=2, patch_stride=[2, 2], num_mel_bins=16, hidden_size=32, window_size=4),
            **dict(depths=[2, 2], num_attention_heads=[2, 4], patch_embeds_hidden_size=16, drop_path_rate=0.0),
            **dict(enable_fusion=False, projection_dim=16),
        ),
    ),
}
"""Models whose scores have a bias on a grid, in windows."""


def config_of(name: str, **change: Any) -> tuple[Any, Any]:
    """The class of a model and its configuration, with other values for those fields that it has."""
    made, config = MODELS[name]()
    for key, value in change.items():
        if hasattr(config, key):
            setattr(config, key, value)
    return made, config
