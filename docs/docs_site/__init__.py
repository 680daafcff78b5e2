"""How the site of the docs is made and checked; used by `mkdocs.yml` and `nox -s docs`. The text is around it."""
