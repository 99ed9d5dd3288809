"""The UVM driver model: programs, the driver that serves them, and captures of what it did."""
