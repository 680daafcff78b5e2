"""Registration of `dcp tiers`, `dcp promote` and `run.tiers.toml` by hooks. Imports nothing heavy."""

from dcp_hooks import CommandSpec, hookimpl

__all__ = ["dcp_register_commands", "dcp_register_roots"]


@hookimpl
def dcp_register_commands() -> list[CommandSpec]:
    """Return the commands that look at tiers and promote between them."""
    return [
        CommandSpec("tiers", "dcp_tiers.commands.show_tiers:command", "Show which checkpoint is in which tier."),
        CommandSpec("promote", "dcp_tiers.commands.promote_tiers:command", "Copy to each tier what it must still get."),
    ]


@hookimpl
def dcp_register_roots() -> dict[str, str]:
    """Return what reads the description of tiers."""
    return {"run.tiers.toml": "dcp_tiers.tiers:Tiers.read"}
