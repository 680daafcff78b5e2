"""Versions, change notes and staged packages of a release."""
