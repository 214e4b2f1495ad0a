"""One Dovetail plugin of each kind, in as few lines as each can be."""
