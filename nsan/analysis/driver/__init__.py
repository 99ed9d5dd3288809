"""What the driver did: pushes, batches, fault rows, their outcome and their time."""
