"""Request and answer models of /v1/responses."""
