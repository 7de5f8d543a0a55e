"""What `ada-trl check` does: one step, looked at closely."""
