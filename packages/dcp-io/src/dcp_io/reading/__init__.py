"""Reads of verified byte ranges out of data files, in parallel and in bounded memory."""
