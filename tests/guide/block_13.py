# Start with conservative sparsity
attention.set_sparsity_ratio(0.5)  # 50% sparse

# Monitor quality during training
for epoch in range(num_epochs):
    train_model()
    
    # Get performance stats
    stats = attention.get_performance_stats()
    
    # Adjust sparsity based on quality
    if stats['quality_score'] > 0.98:
        # Quality is high, increase sparsity
        current_sparsity = attention.sparse_config.sparsity_ratio
        attention.set_sparsity_ratio(current_sparsity * 0.8)
        print(f"Increased sparsity to {current_sparsity * 0.8:.1%}")
