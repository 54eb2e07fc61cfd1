"""Marks of files of tests whose kernels, or committed cubins, run on Hopper alone."""

import pytest
import torch

FOUND = torch.cuda.get_device_capability() if torch.cuda.is_available() else (9, 0)

for_kernels = pytest.mark.skipif(FOUND[0] != 9, reason="sm90 kernels run on Hopper alone")
for_cubins = pytest.mark.skipif(
    FOUND != (9, 0), reason="the committed cubins are for compute capability 9.0"
)
