"""What PyTorch's CUDA caching allocator (PCA) does: its rules by version, and replays of its history.

Sources are named in the modules. "Segment" is what the allocator takes from the driver, "block" a part
of a segment, "tensor" a block in use.
"""
