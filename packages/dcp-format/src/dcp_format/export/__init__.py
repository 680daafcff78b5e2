"""Export: whole safetensors files that all ranks write together, each byte once, at computed offsets."""
