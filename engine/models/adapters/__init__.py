"""Adapters (LoRA) in the form of PEFT: what a checkpoint holds and what of it is served."""
