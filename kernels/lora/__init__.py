"""LoRA: low-rank additions to the output of a linear layer, for the rows of a step grouped by adapter."""
