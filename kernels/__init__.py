"""The kernels of pageserve: paged attention, KV-cache writes and the small fused operators around them.

Each file holds one operator: its Triton kernel, the launcher that the models call, and `*_reference`, the same operator
in plain torch. CUDA tensors go to Triton; CPU tensors go to `kernels.cpu` (numba, oneDNN), or to torch if numba is not
installed. This file imports nothing, so that a CPU process never loads Triton.
"""
