"""Acceptance: predicted before serving, measured while serving, the difference explained, and what it is worth in time."""
