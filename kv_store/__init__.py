"""File-backed KV pages, their manifest and the token ledger. Knows no request, session policy or SLA."""
