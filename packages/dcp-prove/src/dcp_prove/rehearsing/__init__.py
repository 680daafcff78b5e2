"""Rehearsal of a large save in virtual time: the states of jobs, the report, and the command `dcp rehearse`."""
