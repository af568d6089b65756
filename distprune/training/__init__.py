"""Training with zeros that stay zero, in any layout and with any optimizer."""
