"""Where assets come from: a pinned wheel, a model hub, or a folder of the user's."""
