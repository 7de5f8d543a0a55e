"""What the methods do to prompts of known pass rate: closed forms and a solvable model."""
