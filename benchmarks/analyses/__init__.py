"""Closed forms and exactly solvable models of the methods, for prompts with given pass rates."""
