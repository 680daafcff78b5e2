"""Stock's Hugging Face storages over safetensors."""
