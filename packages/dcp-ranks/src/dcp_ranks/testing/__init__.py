"""Ranks as processes that stay between tests, coordinators of each kind on them, and what they tell each other."""
