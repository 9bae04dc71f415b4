"""Unit tests work on small tensors, often in parallel processes: threads only get in each other's way."""

import torch

torch.set_num_threads(1)
