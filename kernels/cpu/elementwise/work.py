"""Constants that the kernels of this folder share."""

import torch

CHUNK = 8192  # minimum elements per work item: about 2 us, well above the cost of handing an item out
DTYPES = (torch.bfloat16, torch.float32)
