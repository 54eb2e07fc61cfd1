"""The parts of torch_cubin.producers.triton. Triton is imported only when it is needed."""
