"""XLA options that hide collectives, by kind of chip."""


def compiler_options(device_kind):
    return {}
