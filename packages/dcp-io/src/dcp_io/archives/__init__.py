"""Zip archives and CRCs: checksums of stored bytes, and the archive framing that `torch.load` opens."""
