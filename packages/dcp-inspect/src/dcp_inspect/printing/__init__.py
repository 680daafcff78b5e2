"""What people and scripts see: lines, tables, trees, progress, and suggestions of names."""
