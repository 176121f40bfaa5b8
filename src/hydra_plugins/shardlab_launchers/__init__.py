"""Launchers for Hydra multirun."""
