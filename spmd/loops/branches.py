def cond(*a):
    raise NotImplementedError


def while_loop(*a):
    raise NotImplementedError
