"""Pages on runs, made of the files that they leave: one run, or several side by side."""
