"""Prompts, conversations that the target answers, its hidden states in a store, and the draft vocabulary."""
