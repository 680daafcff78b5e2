"""Plans and metadata as tables of columns instead of one record per item, for plans of 100,000 items."""
