"""Linear layers over bf16 weights on a CPU, plain and in 12 bits, and the terms that adapters add to them."""
