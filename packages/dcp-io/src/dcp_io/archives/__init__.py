"""Archives and CRCs: checksums of stored bytes, and the zip framing that `torch.load` opens."""
