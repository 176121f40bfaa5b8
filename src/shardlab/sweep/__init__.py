"""Sweeps: every combination in a run of its own, none lost, one picture at the end."""
