"""Several runs and their evaluations, joined into one result."""
