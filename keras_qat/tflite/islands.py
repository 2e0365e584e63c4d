def write_island(*a):
    raise NotImplementedError
