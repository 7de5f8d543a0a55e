"""Which prompts are asked, and how often: the stream and its queue, rounds on every process, slots through a server."""
