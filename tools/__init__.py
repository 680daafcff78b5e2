"""Programs of the nox sessions: their environments, what a release is made of, the pictures of the pages."""
