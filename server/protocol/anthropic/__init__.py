"""Request and answer models of /v1/messages."""
