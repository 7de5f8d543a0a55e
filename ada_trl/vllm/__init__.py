"""vLLM: the client, the engine behind the trainer, and how the weights reach it."""
