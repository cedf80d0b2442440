"""What every test shares: one torch thread (two workers run side by side) and examples that are the same every time."""

import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("limpet", deadline=None, derandomize=True)
settings.load_profile("limpet")
