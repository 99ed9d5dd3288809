"""The CUDA microbenchmark: programs that make traces on a real GPU, and what builds, runs and sweeps them.

The programs themselves are in ``cuda/``: C++17 and CUDA, without dependencies.
"""
