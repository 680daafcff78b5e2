"""Bytes of tensors: copied, cast and made piece by piece; knows no plan."""
