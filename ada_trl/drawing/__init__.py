"""Figures of training runs: curves out of logs, and what is drawn of them."""
