"""The memory of the KV cache: its size on the device, in host memory and on disk, and the moves between these."""
