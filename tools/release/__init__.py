"""What a release is made of: one version, and the change notes since the last one. See `docs/development/releasing.md`.

`python -m tools.release 0.2.0` writes both into the packages; `nox -s release` checks them, builds every
package and runs `smoke.py` with what was built. Nothing here needs more than the standard library.
"""
