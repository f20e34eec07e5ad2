"""Dataset sources: folders, lists, shards, named datasets; class names and splits."""
