"""What to expect of a setting before it is run: closed forms over the prompts' difficulty."""
