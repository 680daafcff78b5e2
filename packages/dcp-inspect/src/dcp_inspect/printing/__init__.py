"""Output for people and scripts: lines, tables, trees, progress bars, and suggestions of names."""
