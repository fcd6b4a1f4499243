from dilated_attention_pytorch import create_block_sparse_multihead_attention

# Quick creation with defaults
attention = create_block_sparse_multihead_attention(
    embed_dim=512,
    num_heads=8,
    sparsity_ratio=0.25,  # 75% sparse
    pattern_type='dilated_sparse'
)

# Use exactly like nn.MultiheadAttention
output, weights = attention(query, key, value, need_weights=True)
