"""The keeper: a process that holds objects in memory and lends memory to savers. Imports the standard library alone."""
