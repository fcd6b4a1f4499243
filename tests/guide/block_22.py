# Ensure sequence length is divisible by block_size
seq_len = 10_000
block_size = 128
padded_len = ((seq_len + block_size - 1) // block_size) * block_size
# Pad sequence to padded_len
