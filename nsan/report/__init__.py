"""The report: sections of blocks, a notebook that shows them, papermill that runs it, and what it becomes."""
