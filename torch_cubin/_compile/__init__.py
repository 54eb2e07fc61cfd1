"""Run-time compilation of CUDA C++: the implementation of torch_cubin.compile."""
