"""The paged pools: byte layout of a record, the pool classes, capacity arithmetic."""
