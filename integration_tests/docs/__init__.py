"""README and docs tell the truth, and their site has every page; the pictures of the command are made here, too."""
