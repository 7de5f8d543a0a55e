"""Training runs that compare the methods on small models and on a language model, and the report on them."""
