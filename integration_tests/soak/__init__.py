"""A run that meets all kinds of faults at random: `nox -s soak`."""
