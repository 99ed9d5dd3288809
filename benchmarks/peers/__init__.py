"""What `python -m benchmarks.results` measures: nsan and its peers, on the same files, asked the same questions.

A contestant is a command. It runs in a process of its own, its answer is read from what it printed, and
stands beside the answer that plain SQL gives. Nothing of a peer is kept but figures.
"""
