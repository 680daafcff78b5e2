"""Records as columns, for plans of 100,000 items; one module per table."""
