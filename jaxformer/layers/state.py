"""The name of the collection of variables that are neither parameter nor cache."""

STATE = "state"
"""Saved with a run, changed in training only, the same in evaluation, recomputation and decoding."""
