"""Which device, its queues and graphs, and the memory and cores of the host beside it."""
