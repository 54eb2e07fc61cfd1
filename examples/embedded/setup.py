"""A package whose wheel contains its kernels in one shared library: `mine/_kernels.abi3.so`.

pip wheel --no-build-isolation --no-deps .      # a C compiler, no nvcc; torch_cubin installed
pip install torch_cubin-*.whl mine-*.whl        # torch_cubin is not on PyPI: give its wheel, too
"""

from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel

from torch_cubin.embed import CubinExtension


class Wheel(bdist_wheel):
    """The library does not use Python's ABI, so one wheel serves every version."""

    def get_tag(self):
        return "py3", "none", super().get_tag()[2]


setup(
    name="mine",
    version="1.0",
    packages=["mine"],
    ext_modules=[
        CubinExtension("mine._kernels", sorted(Path("../../tests/data").glob("vec_add.*")))
    ],
    cmdclass={"bdist_wheel": Wheel},
)
