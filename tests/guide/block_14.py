import torch

def create_custom_pattern(seq_len, num_heads, block_size=128):
    """Create a custom attention pattern"""
    num_blocks = seq_len // block_size
    pattern = torch.zeros(num_heads, num_blocks, num_blocks, dtype=torch.bool)
    
    # Custom logic: attend to every 3rd block + diagonal
    for h in range(num_heads):
        for i in range(num_blocks):
            # Diagonal attention
            pattern[h, i, i] = True
            
            # Every 3rd block
            for j in range(0, num_blocks, 3):
                pattern[h, i, j] = True
                
            # Local window of size 2
            for offset in [-1, 1]:
                j = i + offset
                if 0 <= j < num_blocks:
                    pattern[h, i, j] = True
                    
    return pattern

# Use custom pattern
attention.pattern_generator.pattern_cache[key] = custom_pattern
