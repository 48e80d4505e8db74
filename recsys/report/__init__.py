"""Pages on runs, made from the files in their directories: one run, or several side by side."""
