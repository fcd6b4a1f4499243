from dilated_attention_pytorch import (
    BlockSparseRingAdvancedDistributedDilatedAttention,
    DistributedSparseConfig,
    DistributedSparsePattern
)

config = DistributedSparseConfig(
    pattern_type=DistributedSparsePattern.HIERARCHICAL,
    local_sparsity=0.4,   # Dense within node
    global_sparsity=0.1,  # Sparse across nodes
    inter_node_sparsity=0.05,  # Very sparse between nodes
    enable_gradient_compression=True
)

attention = BlockSparseRingAdvancedDistributedDilatedAttention(
    segment_lengths=[2048, 4096, 8192],
    dilation_rates=[1, 2, 4],
    distributed_config=config
)
