"""Where faults crowd in time and address, and the patterns in which they walk."""
