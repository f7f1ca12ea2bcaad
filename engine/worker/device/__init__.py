"""The choice of the device, its queues and CUDA graphs, and the memory and cores of the host."""
