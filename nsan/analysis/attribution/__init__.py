"""Whose they are: faults, migrations and waiting, by kernel, range, allocation, function, step."""
