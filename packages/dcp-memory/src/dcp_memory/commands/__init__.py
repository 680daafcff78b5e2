"""The command `dcp keeper`, which dcp-inspect finds by the hook `dcp_register_commands`."""
