# Solution: Increase block size
config.block_size = 256  # Larger blocks = fewer blocks
# OR reduce cache size
attention.pattern_generator.pattern_cache.clear()
