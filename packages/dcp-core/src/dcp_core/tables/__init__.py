"""Tables of a plan's records, as columns, for plans of 100,000 items; one module per table."""
