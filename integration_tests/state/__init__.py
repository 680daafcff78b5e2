"""State dicts on real ranks: beside stock's, and in whole training runs."""
