"""Safetensors files and folders of them."""
