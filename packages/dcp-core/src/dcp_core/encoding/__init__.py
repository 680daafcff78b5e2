"""Encoding of tensors and objects as stored bytes, and decoding: payloads, compression and other transforms."""
