"""One training step, from the lookup of vectors to the update of tables."""
