"""What an operation takes: memory, time, kernels."""
