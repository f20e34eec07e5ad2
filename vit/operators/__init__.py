"""Ways of computing that the network is built on, with torch alone."""
