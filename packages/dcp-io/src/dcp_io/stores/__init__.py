"""Stores (folders of named byte objects): the contract, the local one, and help for remote ones."""
