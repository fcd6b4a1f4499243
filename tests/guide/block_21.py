# Solution: Enable caching and pre-generate patterns
config.enable_caching = True

# Pre-generate common patterns
for seq_len in [1024, 2048, 4096, 8192]:
    _ = attention.pattern_generator.create_pattern(seq_len)
