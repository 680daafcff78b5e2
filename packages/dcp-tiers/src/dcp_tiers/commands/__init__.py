"""The commands `dcp tiers` and `dcp promote`, which dcp-inspect finds by the hook `dcp_register_commands`."""
