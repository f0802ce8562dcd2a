"""Routes beside generation and sessions, each a row from which the OpenAPI document is made."""
