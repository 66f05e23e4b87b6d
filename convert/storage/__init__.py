"""Weights in every kind of storage that trainers leave behind, read piece by piece; nothing of a pickle ever runs."""
