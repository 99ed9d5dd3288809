"""Files on disk to typed frames, and back to a Parquet store."""
