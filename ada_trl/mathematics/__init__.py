"""Math problems: their prompts, their sources, and the verification of answers."""
