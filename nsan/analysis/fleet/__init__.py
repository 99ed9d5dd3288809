"""What many reports say together: which rank or run stands out, and by how much. Frames only."""
