def measure_accuracy(session, wanted):
    return {}
