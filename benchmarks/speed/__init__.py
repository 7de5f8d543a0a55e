"""What the methods cost: seconds and memory, side by side with the alternative."""
