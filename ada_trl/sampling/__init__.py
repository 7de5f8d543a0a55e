"""Which prompts are asked, and how often: the stream and its queue, rounds on every process, lanes through a server."""
