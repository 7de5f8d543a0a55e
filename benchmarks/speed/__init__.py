"""Trainers for comparisons of speed."""
