"""Safetensors files and folders: headers, index, reading and writing."""
