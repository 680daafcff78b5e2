"""The `dcp` command on values of all kinds and hostile names; a transcript of all that it prints."""
