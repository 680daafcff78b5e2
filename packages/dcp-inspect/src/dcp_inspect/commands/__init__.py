"""The commands, one module each; each has a `click` command under the name `command`."""
