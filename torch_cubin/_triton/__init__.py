"""What torch_cubin.producers.triton is made of. Nothing here imports Triton before it is needed."""
