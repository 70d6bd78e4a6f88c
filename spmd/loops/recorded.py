def current():
    return None


def recorded(*a):
    raise NotImplementedError
