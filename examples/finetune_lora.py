"""Finetune a transformers model with LoRA on long rows of a text, by the Trainer.

    python examples/finetune_lora.py my.txt --model path/to/model --context 16384 --window 1024 --save adapter

Without --model, it makes a small Mistral with random weights that reads bytes. Without a file, the model learns the
manual that comes with Python. Run the command again with more --steps and it goes on from its last checkpoint.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, MistralConfig, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from ringtile.integrations.transformers import use_ringtile
from ringtile.patterns import GlobalTokens, Window


def read_text(file: Path | None) -> str:
    """Read a file, or the manual that comes with Python."""
    return file.read_text(encoding="utf-8") if file else "\n".join(topics.values())


def new_model(path: str | None, context: int) -> Any:
    if path:
        return AutoModelForCausalLM.from_pretrained(path)
    config = MistralConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context,
        sliding_window=None,
    )
    return AutoModelForCausalLM.from_config(config)


def rows_of(text: str, path: str | None, context: int) -> Tensor:
    """Return the tokens ``[rows, context]`` of a text: those of the model's tokenizer, or bytes."""
    if path:
        tokens = AutoTokenizer.from_pretrained(path)(text, return_tensors="pt")["input_ids"][0]
    else:
        tokens = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long()
    if len(tokens) < context:
        raise SystemExit(f"the text has {len(tokens):,} tokens: too few for --context {context}")
    return tokens[: len(tokens) // context * context].view(-1, context)


def main(argv: Sequence[str] | None = None) -> float:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("file", type=Path, nargs="?")
    parser.add_argument("--model", help="name or folder of a causal language model")
    parser.add_argument("--context", type=int, default=16384)
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16, by autocast")
    folder = Path(tempfile.gettempdir(), "ringtile-lora")
    parser.add_argument("--save", type=Path, default=folder, help="folder of adapter and checkpoints (%(default)s)")
    args = parser.parse_args(argv)
    if args.file and not args.file.is_file():
        parser.error(f"file: expected a text file, got {str(args.file)!r}")
    torch.manual_seed(0)
    model = new_model(args.model, args.context)
    # Each layer keeps the pairs that the pattern and its own mask keep. All tokens also attend to the first 4.
    use_ringtile(model, Window(args.window) | GlobalTokens(4))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    projections = ["q_proj", "k_proj", "v_proj", "o_proj"]
    model = get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules=projections, task_type="CAUSAL_LM"))
    rows = rows_of(read_text(args.file), args.model, args.context)
    training = TrainingArguments(
        output_dir=str(args.save),
        max_steps=args.steps,
        per_device_train_batch_size=1,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        bf16=args.bf16,
        logging_steps=1,
        save_steps=5,
        report_to="none",
        disable_tqdm=not sys.stderr.isatty(),
        use_cpu=not torch.cuda.is_available(),
    )
    trainer = Trainer(model, training, train_dataset=[{"input_ids": row, "labels": row} for row in rows])
    last = get_last_checkpoint(str(args.save)) if args.save.exists() else None
    loss = trainer.train(resume_from_checkpoint=last).training_loss
    model.save_pretrained(args.save)
    print(f"adapter in {args.save}; mean loss of this run {loss:.3f}")
    return loss


if __name__ == "__main__":
    main()
