"""A promoter at work: what nearer tiers have, promotion to one tier, and what the promoter hears of its trainer."""
