"""Tools that clean, convert and describe data sets."""
