"""Reads of verified byte ranges from data files, in parallel and in bounded memory."""
