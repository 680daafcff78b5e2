"""One agreed step of several ranks: attempt, exchange outcomes, conclude."""
