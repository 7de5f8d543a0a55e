"""Utilities for all layers: files, distributed processes, logging, tables."""
