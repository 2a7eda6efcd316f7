"""From a hub repository to a converted directory: download, recipes, quantising, repacking."""
