"""Training application: tokenizer, text, position of each sequence. Models and loops come from the libraries."""
