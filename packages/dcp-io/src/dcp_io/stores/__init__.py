"""Stores (folders of named byte objects): the abstract classes, the local store, and helpers for remote stores."""
