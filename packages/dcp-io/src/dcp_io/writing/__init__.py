"""Items of one rank into data files, in parallel."""
