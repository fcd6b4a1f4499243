import torch
from dilated_attention_pytorch import (
    BlockSparseRingMultiheadDilatedAttention,
    create_block_sparse_multihead_attention
)

class SparseTransformerBlock(torch.nn.Module):
    def __init__(self, d_model=512, n_heads=8, sparsity=0.1):
        super().__init__()
        
        # Create sparse attention
        self.attention = create_block_sparse_multihead_attention(
            embed_dim=d_model,
            num_heads=n_heads,
            sparsity_ratio=sparsity,
            pattern_type='dilated_sparse',
            dropout=0.1
        )
        
        self.norm1 = torch.nn.LayerNorm(d_model)
        self.norm2 = torch.nn.LayerNorm(d_model)
        self.ffn = torch.nn.Sequential(
            torch.nn.Linear(d_model, 4 * d_model),
            torch.nn.GELU(),
            torch.nn.Linear(4 * d_model, d_model)
        )
        
    def forward(self, x):
        # Self-attention with sparse pattern
        attn_out, _ = self.attention(x, x, x)
        x = self.norm1(x + attn_out)
        
        # FFN
        ffn_out = self.ffn(x)
        x = self.norm2(x + ffn_out)
        
        return x

# Create model
model = torch.nn.Sequential(*[
    SparseTransformerBlock(sparsity=0.1)  # 10x speedup per layer
    for _ in range(12)
])

# Process long sequences efficiently
batch_size = 4
seq_len = 100_000  # 100K tokens!
d_model = 512

x = torch.randn(batch_size, seq_len, d_model)
output = model(x)  # Efficient sparse processing
