"""Many reports as one: ranks, nodes, nights."""
