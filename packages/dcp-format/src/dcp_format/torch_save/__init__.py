"""`torch.save` files, and stock's calls and readers for them."""
