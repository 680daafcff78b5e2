"""Plans and metadata as columns instead of one record per item, for plans of 100,000 items.

The four forms of a value in a save, in order:

1. Flat state dict, of `dcp_core.state_dict.flatten`: name → value.
2. Index without locations: `PlanColumns` has one rank's items, `MergedPlans` (`dcp_core.planning.global_plan`) those of
   all ranks. The rows that a rank writes are a `Selection` of its own items, and `PlannedRows` of the merged index.
3. Requests, `dcp_io.requests.Writable`, which produce their bytes (`Payload`) in a writer thread.
4. Index with locations: `StoredItems` come from the writer threads, `WrittenColumns` join them to the rank's items, and
   `written_index` joins all ranks' to the index that is published.

Records (`WriteItem`, `WriteResult`, entries of `Metadata`) are made of these on access. Other classes are messages
between ranks and their caches (`plan_exchange`), or steps in the assignment of items to ranks (`global_plan`).
"""
