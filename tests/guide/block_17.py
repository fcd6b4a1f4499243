# Enable comprehensive monitoring
attention.performance_monitor.enable()

# Run inference/training
for batch in dataloader:
    output = model(batch)
    
# Get performance report
stats = attention.get_performance_stats()
print(f"Average forward time: {stats['avg_forward_time_ms']:.2f}ms")
print(f"Average sparsity: {stats['avg_sparsity']:.1%}")
print(f"Average speedup: {stats['avg_speedup']:.1f}x")
print(f"Memory usage: {stats['avg_memory_mb']:.1f}MB")
