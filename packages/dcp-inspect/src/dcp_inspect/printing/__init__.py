"""Output for people and scripts: lines, tables, trees, and suggestions of names."""
