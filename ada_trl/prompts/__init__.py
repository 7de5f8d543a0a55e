"""Which prompts are asked: a stream of the data set, lanes that take from it, selection by expected gain."""
