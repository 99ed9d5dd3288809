"""Rows that the profiler dropped: the driver's prefetcher replayed, and what does not fit."""
