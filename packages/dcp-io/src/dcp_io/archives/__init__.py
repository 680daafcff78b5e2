"""CRCs, and the zip framing that `torch.load` opens."""
