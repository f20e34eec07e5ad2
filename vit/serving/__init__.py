"""`vit serve`: saved networks behind an HTTP interface and a web page."""
