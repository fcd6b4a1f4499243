import torch.distributed as dist
from dilated_attention_pytorch import (
    BlockSparseRingAdvancedDistributedDilatedAttention,
    DistributedSparseConfig,
    DistributedSparsePattern
)

# Initialize distributed training
dist.init_process_group(backend='nccl')

# Configure hierarchical sparsity
config = DistributedSparseConfig(
    pattern_type=DistributedSparsePattern.HIERARCHICAL,
    local_sparsity=0.5,      # 50% density within GPU
    global_sparsity=0.2,     # 20% density within node
    inter_node_sparsity=0.05,  # 5% density across nodes
    enable_load_balancing=True,
    enable_gradient_compression=True,
    compression_ratio=0.1    # 90% gradient compression
)

# Create distributed sparse attention
attention = BlockSparseRingAdvancedDistributedDilatedAttention(
    segment_lengths=[2048, 4096, 8192, 16384],
    dilation_rates=[1, 2, 4, 8],
    distributed_config=config,
    enable_deepspeed_integration=True
)

# Process massive sequences across GPUs
# Each GPU handles its portion with sparse communication
output = attention(q_local, k_local, v_local)
