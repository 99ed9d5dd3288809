"""Rows to answers: pure functions from typed frames to typed frames."""
