"""The trainer and its configuration; the only place that knows GRPOTrainer from the inside."""
