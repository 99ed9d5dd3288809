"""Views for a notebook: the explorer, and two traces side by side."""
