# PyTorch Lightning example
import pytorch_lightning as pl

class SparseLM(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.attention = create_block_sparse_multihead_attention(
            embed_dim=768,
            num_heads=12,
            sparsity_ratio=0.1
        )
        
    def forward(self, x):
        return self.attention(x, x, x)[0]
        
    def training_step(self, batch, batch_idx):
        output = self(batch['input'])
        loss = F.cross_entropy(output, batch['target'])
        
        # Log sparsity metrics
        stats = self.attention.get_performance_stats()
        self.log('train/speedup', stats['avg_speedup'])
        self.log('train/sparsity', stats['avg_sparsity'])
        
        return loss

# Train with automatic optimization
trainer = pl.Trainer(
    accelerator='gpu',
    devices=8,
    strategy='ddp',
    precision=16
)
trainer.fit(model)
