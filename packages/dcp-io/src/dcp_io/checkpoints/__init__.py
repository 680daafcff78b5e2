"""Operations on saved checkpoints: list, find the newest, verify, remove."""
