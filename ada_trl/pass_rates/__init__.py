"""What is known about a prompt's pass rate before it is sampled."""
