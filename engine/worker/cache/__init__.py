"""The memory of the KV cache: on the device, in host memory, on disk, and the moves between them."""
