"""The HTTP server: routes, access checks, admission, streaming, errors."""
