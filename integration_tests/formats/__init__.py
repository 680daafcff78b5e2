"""Safetensors and `torch.save` files, through checkpoints and back."""
