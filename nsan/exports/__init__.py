"""What nsan writes for other programs: a trace for Perfetto, and folders of tables."""
