"""`python -m dcp_inspect`: the same as `dcp`."""

from dcp_inspect.cli import main

if __name__ == "__main__":
    main()
