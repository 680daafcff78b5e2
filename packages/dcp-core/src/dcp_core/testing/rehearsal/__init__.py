"""A save or load of many ranks in one process and in virtual time, with faults that a seed chooses."""
