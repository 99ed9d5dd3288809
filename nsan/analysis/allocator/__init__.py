"""What a memory snapshot of PyTorch's caching allocator says: state, history, fragmentation, tensors."""
