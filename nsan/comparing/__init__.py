"""Conditions compared: their runs opened, their figures measured, whether they are comparable."""
