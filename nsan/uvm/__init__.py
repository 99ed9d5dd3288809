"""What the NVIDIA UVM driver does, in one place: constants and VA-block arithmetic."""
