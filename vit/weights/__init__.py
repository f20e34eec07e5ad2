"""Files to networks and back: other libraries' weights, and run folders."""
