"""Where the pieces of each tensor live. Knows nothing of the update rules."""
