"""pip wheel --no-build-isolation --no-deps examples/cpp/extension: needs no nvcc."""

from pathlib import Path

from setuptools import setup

from torch_cubin import cpp

CUBIN = Path(__file__).resolve().parent.parent / "kernels" / "scale_add.sm_90a.cubin"

setup(
    name="cpp_example",
    version="1.0",
    py_modules=["use"],
    ext_modules=[cpp.Extension("cpp_example_ops", ["ops.cpp"], embed={"scale_add_cubin": [CUBIN]})],
    install_requires=["torch"],
)
