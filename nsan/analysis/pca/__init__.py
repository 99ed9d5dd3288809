"""What PyTorch's caching allocator (PCA) does to the driver: a memory snapshot joined with a trace."""
