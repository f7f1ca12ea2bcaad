"""The Worker process: the only code that owns a device."""
