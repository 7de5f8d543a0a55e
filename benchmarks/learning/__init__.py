"""What the methods learn: training runs of a tiny language model, and the report on them."""
