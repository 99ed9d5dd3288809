"""The sections of a report: each a function of a report that gives blocks."""
