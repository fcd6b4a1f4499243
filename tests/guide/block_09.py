from dilated_attention_pytorch import create_adaptive_sparse_multihead_attention

# Create attention that learns sparsity patterns
attention = create_adaptive_sparse_multihead_attention(
    embed_dim=768,
    num_heads=12,
    segment_lengths=[1024, 2048, 4096],
    dilation_rates=[1, 2, 4],
    quality_threshold=0.95  # Maintain 95% quality
)

# The attention automatically:
# 1. Learns which connections are important
# 2. Adapts patterns based on input content
# 3. Maintains quality above threshold
# 4. Optimizes for maximum speedup

# Training loop
for batch in dataloader:
    output, weights = attention(batch, need_weights=True)
    loss = compute_loss(output, targets)
    loss.backward()
    
    # Patterns automatically update based on gradients
    optimizer.step()
