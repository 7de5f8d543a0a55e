"""Where rollouts come from."""
