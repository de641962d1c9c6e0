"""A lean runtime for the Llama family: a few hundred lines from safetensors to streamed tokens."""
