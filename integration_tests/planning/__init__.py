"""Which rank writes what: plans that are used again, and replicas that several ranks write in parts."""
