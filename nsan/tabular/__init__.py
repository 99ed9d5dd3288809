"""Rows for people: which columns, under which heading, each value by its unit; as text, Markdown, CSV, JSON."""
