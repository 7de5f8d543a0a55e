"""Where rollouts come from: rounds through the trainer's own generation, or a vLLM server prompt by prompt."""
