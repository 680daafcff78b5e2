"""Every package beside every other one, and nothing else: `nox -s composition`.

`unit` proves in fresh environments that a package declares what it needs. Here the third-party libraries are shared,
and what differs is which of our packages can be found: one folder has links to the libraries, another one links to the
packages of a selection and their metadata. One process that has imported the libraries forks a child per selection.
"""
