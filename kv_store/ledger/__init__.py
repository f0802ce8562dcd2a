"""The token ledger and page manifest: records, queries, continuity, reserve space."""
