"""A planner's items to and from a byte engine."""
