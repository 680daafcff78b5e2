"""Named columns of numbers in a safetensors blob, with CRCs."""
