"""Plans and metadata as columns instead of one record per item, for plans of 100,000 items."""
