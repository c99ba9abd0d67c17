"""Real weights from installed packages: found, checked, converted and cached."""
