"""Copy engines: carry out relocations between two forwards (paper §3.4)."""
