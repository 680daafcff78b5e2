"""Reader and writer of Hugging Face safetensors, under the names that stock gives them."""
