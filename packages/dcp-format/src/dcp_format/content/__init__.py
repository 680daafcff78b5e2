"""What a conversion carries from one format to another, and new files that have their name only when complete."""
