def traced_row(*a):
    raise NotImplementedError
