# Get memory usage information
memory_info = attention.get_memory_info()
print(f"Pattern cache size: {memory_info['pattern_cache_size']}")
print(f"Memory reduction: {memory_info['memory_reduction']}")
print(f"Theoretical speedup: {memory_info['theoretical_speedup']}")

# Clear caches if needed
attention.pattern_generator.pattern_cache.clear()
torch.cuda.empty_cache()
