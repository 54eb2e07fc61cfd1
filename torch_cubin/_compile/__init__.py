"""CUDA C++ compiled in the process that launches it: what torch_cubin.compile is made of."""
