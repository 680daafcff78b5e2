"""Phases, the agreed steps of several ranks: attempt, exchange outcomes, conclude."""
