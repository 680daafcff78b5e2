"""The manager on real ranks that are killed, on full disks and on object stores."""
