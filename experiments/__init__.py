"""Config files, one for each task; `jaxformer list` shows them. Each has `get_config(arg=None)`."""
