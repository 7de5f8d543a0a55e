"""Measurements of the package, all started with `python -m`."""
