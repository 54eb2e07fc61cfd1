"""Every forward kernel of 16 bits that all architectures have (mma.cu and pair.cu of
csrc/kernels/attention), as test_cuda_attention_tiles.py does it."""

import pytest
from gpu.test_cuda_attention_tiles import check_tile, of_tiles


@pytest.mark.parametrize("name", of_tiles("forward"))
def test_every_kernel_of_a_tile(name: str, child) -> None:
    check_tile(child.check())
