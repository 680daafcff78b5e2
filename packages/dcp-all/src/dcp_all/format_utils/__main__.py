"""`python -m dcp_all.format_utils`: stock's command line, which converts between torch.save files and checkpoints."""

from dcp_format.torch_save.stock_calls import main

raise SystemExit(main())
