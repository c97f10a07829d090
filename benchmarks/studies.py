def measure_shared(s,w):
    return {}
measure_growth=measure_longtail=measure_shared
