"""Container of a manifest: named columns of numbers in a safetensors blob, with CRCs."""
