"""When to save, what to keep, and whether training may go back."""
