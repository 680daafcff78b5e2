"""Test tools: rank processes that are kept between tests, coordinators of each kind, and signals between ranks."""
